"""Orderly end of interrupted commands: their processes and folders are removed."""

from __future__ import annotations

import os
import signal
from types import FrameType

INTERRUPTED = 130  # exit status
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def raise_when_interrupted(said: str = "") -> None:
    """Let the first SIGINT or SIGTERM raise KeyboardInterrupt, with the signal's name; later ones are ignored.

    A second KeyboardInterrupt would stop the clean-up. A signal that was ignored before stays ignored, such as SIGINT
    in a shell's background job.

    Args:
        said: Line to print on stderr at the interruption.
    """

    def interrupt(signum: int, frame: FrameType | None) -> None:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if said:
            os.write(2, f"\n{said}\n".encode())
        raise KeyboardInterrupt(signal.Signals(signum).name)

    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
