"""Verdicts, and the exit status of each."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum


class Verdict(StrEnum):
    """First that applies; `exit_status` is what a shell sees."""

    ERROR = "ERROR"
    UNSUPPORTED = "UNSUPPORTED"
    NOT_ENGAGED = "NOT_ENGAGED"
    NOT_EQUIVALENT = "NOT_EQUIVALENT"
    UNVERIFIED = "UNVERIFIED"
    INVALID = "INVALID"
    FASTER = "FASTER"
    SLOWER = "SLOWER"
    SAME = "SAME"
    INCONCLUSIVE = "INCONCLUSIVE"
    PROFILED = "PROFILED"  # mode=profile: there is nothing to compare
    VERIFIED = "VERIFIED"  # verify=only: nothing was timed

    @property
    def exit_status(self) -> int:
        return _EXIT_STATUS.get(self, 0)

    @property
    def measured(self) -> bool:
        """Whether a speedup may be shown with it."""
        return self in (Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.INCONCLUSIVE)


_EXIT_STATUS = {
    Verdict.ERROR: 1,
    Verdict.NOT_EQUIVALENT: 3,
    Verdict.UNVERIFIED: 3,
    Verdict.INVALID: 3,
    Verdict.UNSUPPORTED: 4,
    Verdict.NOT_ENGAGED: 4,
}


REGRESSION_STATUS = 5  # of a comparison that became slower than a recorded one


def worst_status(verdicts: Iterable[Verdict], regressed: bool = False) -> int:
    """The exit status of a sweep: the worst job's, where a job that could not apply here fails nothing.

    Args:
        regressed: Whether any job became slower than a recorded one.
    """
    statuses = {0 if verdict is Verdict.UNSUPPORTED else verdict.exit_status for verdict in verdicts}
    statuses |= {REGRESSION_STATUS} if regressed else set()
    return next((status for status in (1, 3, REGRESSION_STATUS, 4) if status in statuses), 0)
