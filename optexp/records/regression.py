"""A result beside a recorded one as data, as a record holds it. Needs no torch to be read."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from optexp.records.measurement import Ratio


class Outcome(StrEnum):
    """The outcome of a comparison with a recorded result."""

    ALARM = "ALARM"  # the interval excludes every change up to the threshold
    NO_REGRESSION = "no regression"  # the interval excludes every change beyond the threshold
    UNDECIDED = "undecided"
    NOT_COMPARED = "not compared"


@dataclass(frozen=True)
class Regression:
    """A new result beside a recorded one of the same fingerprint.

    outcome:   of `figure`, "time" or "speedup"
    text:      the same in a sentence
    against:   as the user named it;  run_id: of the recorded result, "" where there is none
    threshold: smallest change that raises an alarm, 0.1 for 10 %
    time, baseline_time: step times, new over recorded, of the candidate and of the baseline
    speedup:   recorded over new: above 1 is a loss
    differs:   where no recorded result has the same fingerprint, the nearest one's differences: [recorded, new]
    """

    outcome: Outcome
    text: str
    against: str
    threshold: float
    figure: str = "time"
    run_id: str = ""
    time: Ratio | None = None
    baseline_time: Ratio | None = None
    speedup: Ratio | None = None
    differs: dict[str, list[str]] = field(default_factory=dict)

    @property
    def alarm(self) -> bool:
        return self.outcome is Outcome.ALARM
