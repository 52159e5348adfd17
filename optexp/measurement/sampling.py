"""One process of each arm: warm-up, then blocks in alternating pairs whose order is drawn at random."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import ceil, log
from random import Random
from statistics import median
from typing import Any
from typing import Protocol as Interface

from optexp.measurement.clock import Timing, now
from optexp.measurement.protocol import Protocol


class Caller(Interface):
    """An arm, in a process of its own or not."""

    def call(self, method: str, **arguments: Any) -> Any: ...


@dataclass(frozen=True)
class Pair:
    """A block of each arm, one directly after the other."""

    baseline: Timing
    candidate: Timing
    baseline_first: bool

    @property
    def log_ratio(self) -> float:
        return log(self.baseline.wall_s / self.candidate.wall_s)


@dataclass
class Sample:
    """What one process of each arm gave."""

    pairs: list[Pair] = field(default_factory=list)
    recompiled: bool = False

    @property
    def log_ratio(self) -> float:
        """The statistic of a process."""
        return median(pair.log_ratio for pair in self.pairs)


def sample(baseline: Caller, candidate: Caller, protocol: Protocol, order: Random) -> Sample:
    """Measure two arms that have been set up; only one of them works at any time."""
    blocks = [_block(arm, protocol) for arm in (baseline, candidate)]
    counted = [_compilations(arm) for arm in (baseline, candidate)]
    long = any(steps == 1 for steps, _ in blocks)
    at_least = min(protocol.pairs, 8 if long else 10)
    result = Sample()
    begin = now()
    while len(result.pairs) < protocol.pairs:
        if len(result.pairs) >= at_least and now() - begin > protocol.process_s:
            break
        baseline_first = order.random() < 0.5
        timings: dict[bool, Timing] = {}
        for is_baseline in (baseline_first, not baseline_first):
            arm = baseline if is_baseline else candidate
            steps, lead_in = blocks[0 if is_baseline else 1]
            jittered = max(1, round(steps * order.uniform(0.9, 1.1)))  # no call number is special
            timings[is_baseline] = arm.call("block", steps=jittered, lead_in=lead_in)
        result.pairs.append(Pair(timings[True], timings[False], baseline_first))
    result.recompiled = counted != [_compilations(arm) for arm in (baseline, candidate)]
    return result


def _block(arm: Caller, protocol: Protocol) -> tuple[int, int]:
    """Steps of a block and of its unmeasured lead-in, after warm-up.

    Batches that were made in the background while nothing was timed are used up first, and those that a block leaves
    behind must not matter: a queue that refilled unseen makes a loop look far too fast.
    """
    steady = arm.call("warm_up", limit_s=protocol.warmup_s)
    queue = int(steady["queue"])
    at_least = 12 * queue  # ten lengths after jitter
    if steady["step_s"] >= 0.1:
        return max(1, at_least), max(1, queue)
    duration = max(protocol.block_ms / 1e3, 200 * steady["timer_s"])
    return max(ceil(duration / steady["step_s"]), at_least), max(2, queue)


def _compilations(arm: Caller) -> float:
    counters: dict[str, float] = arm.call("counters")
    return counters.get("stats/unique_graphs", 0.0) + counters.get("frames/total", 0.0)
