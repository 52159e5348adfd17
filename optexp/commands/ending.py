"""Exit status of a command: its own, that of a mistake, or that of an interruption."""

from __future__ import annotations

import sys
from collections.abc import Callable

from optexp.errors import ConfigError, Failure, TrackingError
from optexp.support.interrupting import INTERRUPTED, raise_when_interrupted

MISTAKE = 1  # exit status


def exit_status(command: str, work: Callable[[], int]) -> int:
    """Run a command's work to its end, also where a signal interrupts it.

    Args:
        command: As in `python -m optexp.<command>`.
        work: Returns the exit status.
    """
    raise_when_interrupted()
    try:
        return work()
    except (ConfigError, Failure, TrackingError) as mistake:
        print(f"optexp.{command}: {mistake}", file=sys.stderr)
        return MISTAKE
    except KeyboardInterrupt:
        return INTERRUPTED
