"""Timed blocks as data: pairs of one process of each arm, and what was seen beside them. No clock, no process."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from statistics import median
from typing import NamedTuple

from optexp.measurement.clock import Timing
from optexp.measurement.gpu import Reading, between, slowing
from optexp.measurement.load import Load

MAIN, SAME, DELAYED, COLD = "main", "same", "delayed", "cold"  # what the second arm of a pair is
RETRIED, UNBOUND, TEXTBOOK = "retried", "unbound", "textbook"  # why a process was measured beside those that count
LOOK_EVERY = 2  # pairs: a block of the candidate that is not counted, and may end anywhere
CONTROL_EVERY = 3  # pairs: enough of them to judge, and a third of the cost


class Late(NamedTuple):
    """Seconds of all cores together: how long an arm worked once it had said that it was done with a block, and how
    long it could have worked in that block. Its clock sees none of the former."""

    worked_s: float
    block_s: float


@dataclass(frozen=True)
class Pair:
    """A block of each arm, one directly after the other, and what the card said before and after them."""

    baseline: Timing
    candidate: Timing
    baseline_first: bool
    kind: str = MAIN
    readings: tuple[Reading, ...] = ()

    @property
    def log_ratio(self) -> float:
        return log(self.baseline.step_s / self.candidate.step_s)

    @property
    def counts(self) -> bool:
        return not (self.slowed or self.skipped)

    @property
    def start_s(self) -> float:
        return min(self.baseline.start_s, self.candidate.start_s)

    @property
    def skipped(self) -> bool:
        """Whether a step of it was left out, because gradients overflowed: nor does that one."""
        return self.baseline.skipped or self.candidate.skipped

    @property
    def slowed(self) -> tuple[str, ...]:
        """Why the card ran slower than it can: such a pair does not count."""
        return slowing(between(self.readings))


@dataclass
class Sample:
    """What one process of each arm gave.

    aim:  why it was measured, where no verdict rests on it: RETRIED, UNBOUND or TEXTBOOK
    """

    pairs: list[Pair] = field(default_factory=list)  # of all kinds
    recompiled: bool = False
    alone: dict[str, list[float]] = field(default_factory=dict)  # by arm: seconds of steps that ran one at a time
    alone_later: dict[str, list[list[float]]] = field(
        default_factory=dict
    )  # the same, looked at again after all blocks
    planned_s: dict[str, float] = field(default_factory=dict)  # by arm: seconds a step, by which blocks were planned
    timer_s: dict[str, float] = field(default_factory=dict)  # by arm: what timing nothing costs each of them
    constant: tuple[str, ...] = ()  # inputs that hold one value over and over
    foreign: tuple[str, ...] = ()  # processes of others on the card
    queue: int = 0  # batches that an arm makes in the background, where work aside is honest
    uneven: str = ""  # why blocks of both arms are not of the same batches, where these are not of one size
    floor_s: float = 0.0  # what no program can beat, where that is known
    busy_s: dict[str, float] = field(default_factory=dict)  # by arm: seconds of a step in which the card works (traced)
    idle: dict[str, list[float]] = field(default_factory=dict)  # by arm: share of its cores it kept busy, not its turn
    late: dict[str, list[Late]] = field(default_factory=dict)  # by arm: what it did after blocks of pairs that it ended
    load: dict[str, Load] = field(default_factory=dict)  # by arm, where it was looked at
    aim: str = ""

    def of(self, kind: str) -> list[Pair]:
        return [pair for pair in self.pairs if pair.kind == kind]

    @property
    def kept(self) -> list[Pair]:
        """The pairs that count; where none would be left, all of them: a watchdog then refuses the measurement."""
        main = self.of(MAIN)
        return [pair for pair in main if pair.counts] or main

    @property
    def dropped(self) -> list[Pair]:
        """The others."""
        main = self.of(MAIN)
        return [pair for pair in main if not pair.counts] if any(pair.counts for pair in main) else []

    def single_s(self, arm: str) -> float:
        """Seconds of a typical step that ran alone: the largest over all looks, since blocks between a quiet and a busy
        moment are as slow as the busy one."""
        looks = [self.alone[arm], *self.alone_later.get(arm, ())]
        return max(float(median(look)) for look in looks)

    @property
    def log_ratio(self) -> float:
        """The statistic of a process."""
        return median(pair.log_ratio for pair in self.kept)
