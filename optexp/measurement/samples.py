"""Timed blocks as data: pairs of blocks, and observations made with them. No clock, no process."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import log
from statistics import median
from typing import NamedTuple

from optexp.measurement.clock import Timing
from optexp.measurement.gpu import Reading, between, slowing
from optexp.measurement.load import Load

MAIN, SAME, DELAYED, COLD = "main", "same", "delayed", "cold"  # kinds of pairs; SAME and DELAYED are controls
RETRIED, UNBOUND, TEXTBOOK = "retried", "unbound", "textbook"  # aims of processes that no verdict uses
LOOK_EVERY = 2  # pairs between two blocks whose last step is verified; these blocks do not count
CONTROL_EVERY = 3  # pairs between two pairs of a control: enough for a judgement, at a third of the cost


class Late(NamedTuple):
    """CPU seconds of an arm after its block, which its clock does not see, and the most CPU seconds inside the block.

    worked_s: of all cores, after the arm reported the end of the block
    block_s:  wall time of the block times the number of cores
    """

    worked_s: float
    block_s: float


@dataclass(frozen=True)
class Pair:
    """A block of each arm, one directly after the other, and the GPU's readings before and after them."""

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
        """Whether a GradScaler left a step out, because gradients overflowed."""
        return self.baseline.skipped or self.candidate.skipped

    @property
    def slowed(self) -> tuple[str, ...]:
        """The reasons why the GPU ran below its clock; such a pair does not count."""
        return slowing(between(self.readings))


@dataclass
class Sample:
    """One process of each arm. Mappings are by arm.

    pairs:       of all kinds
    recompiled:  torch.compile compiled while blocks were timed
    alone:       seconds of single steps, each with a wait for the device
    alone_later: single steps timed again after all blocks, once or more
    planned_s:   seconds of a step that the length of blocks was planned by
    timer_s:     seconds that the timing of an empty step takes
    constant:    names of inputs that hold one value
    foreign:     other processes on the GPU
    queue:       most batches that an arm makes in the background: CPU time outside its steps is then honest
    uneven:      why both arms met batches of different sizes; empty where they did not
    floor_s:     physical lower bound of a step; 0 where it is unknown
    busy_s:      seconds of a step in which the GPU works, by the trace
    idle:        shares of its cores that an arm kept busy while the other was timed
    late:        CPU time after the blocks that ended a pair
    load:        energy and utilisation, where they were measured
    aim:         RETRIED, UNBOUND or TEXTBOOK for a process that no verdict uses; else empty
    """

    pairs: list[Pair] = field(default_factory=list)
    recompiled: bool = False
    alone: dict[str, list[float]] = field(default_factory=dict)
    alone_later: dict[str, list[list[float]]] = field(default_factory=dict)
    planned_s: dict[str, float] = field(default_factory=dict)
    timer_s: dict[str, float] = field(default_factory=dict)
    constant: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    queue: int = 0
    uneven: str = ""
    floor_s: float = 0.0
    busy_s: dict[str, float] = field(default_factory=dict)
    idle: dict[str, list[float]] = field(default_factory=dict)
    late: dict[str, list[Late]] = field(default_factory=dict)
    load: dict[str, Load] = field(default_factory=dict)
    aim: str = ""

    def of(self, kind: str) -> list[Pair]:
        return [pair for pair in self.pairs if pair.kind == kind]

    @property
    def kept(self) -> list[Pair]:
        """The pairs that count; all pairs where none counts: a watchdog then refuses the measurement."""
        main = self.of(MAIN)
        return [pair for pair in main if pair.counts] or main

    @property
    def dropped(self) -> list[Pair]:
        """The pairs that `kept` leaves out."""
        main = self.of(MAIN)
        return [pair for pair in main if not pair.counts] if any(pair.counts for pair in main) else []

    def single_s(self, arm: str) -> float:
        """Seconds of a typical single step: the largest median over the moments at which single steps were timed.

        Blocks between a quiet and a busy moment may have been as slow as the busy one.
        """
        looks = [self.alone[arm], *self.alone_later.get(arm, ())]
        return max(float(median(look)) for look in looks)

    @property
    def log_ratio(self) -> float:
        """The statistic of a process: the median over its pairs."""
        return median(pair.log_ratio for pair in self.kept)
