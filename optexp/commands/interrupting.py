"""Commands end in order: processes and folders that they made end with them."""

from __future__ import annotations

import signal
from types import FrameType

INTERRUPTED = 130  # exit status


def raise_when_interrupted() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, the first time; a shell's background job ignores SIGINT still."""
    for number in (signal.SIGINT, signal.SIGTERM):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_IGN)
    raise KeyboardInterrupt
