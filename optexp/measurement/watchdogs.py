"""Predicates over samples: what makes a measurement untrustworthy, or worth a remark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import correlation, median

from optexp.measurement.sampling import Sample


@dataclass(frozen=True)
class Watch:
    """What a watchdog saw. `fatal` makes the measurement INVALID; otherwise it is a remark."""

    name: str
    ok: bool
    text: str
    fatal: bool = False


def recompilation(samples: Sequence[Sample]) -> Watch:
    """A compiler that works while the clock runs makes the figures meaningless."""
    count = sum(sample.recompiled for sample in samples)
    text = f"torch.compile compiled again while measuring, in {count} processes" if count else "no recompilation"
    return Watch("recompilation", count == 0, text, fatal=True)


def order_effect(samples: Sequence[Sample]) -> Watch:
    """Does it matter which arm of a pair runs first?"""
    pairs = [pair for sample in samples for pair in sample.pairs]
    first = [p.log_ratio for p in pairs if p.baseline_first]
    second = [p.log_ratio for p in pairs if not p.baseline_first]
    if min(len(first), len(second)) < 5:
        return Watch("order", True, "too few pairs of each order to compare")
    gap = abs(median(first) - median(second))
    return Watch("order", gap < 0.05, f"ratio differs by {gap:.1%} between baseline-first and candidate-first pairs")


def drift(samples: Sequence[Sample]) -> Watch:
    """Does the ratio move with time inside a process?"""
    correlations = [
        correlation(range(len(s.pairs)), _ranks([p.log_ratio for p in s.pairs]))
        for s in samples
        if len(s.pairs) >= 10 and len({p.log_ratio for p in s.pairs}) > 1
    ]
    if not correlations:
        return Watch("drift", True, "too few pairs to see a drift")
    typical = median(correlations)
    return Watch("drift", abs(typical) < 0.7, f"rank correlation of the ratio with time: {typical:+.2f}")


def _ranks(values: Sequence[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0] * len(values)
    for rank, index in enumerate(order):
        ranks[index] = rank
    return ranks


def device_beats_wall(samples: Sequence[Sample]) -> Watch:
    """A gain on the device that does not reach the user."""
    pairs = [p for s in samples for p in s.pairs if p.baseline.device_s and p.candidate.device_s]
    if not pairs:
        return Watch("device_vs_wall", True, "no device time on this device")
    wall = median(p.baseline.wall_s / p.candidate.wall_s for p in pairs)
    device = median((p.baseline.device_s or 0) / (p.candidate.device_s or 1) for p in pairs)
    lost = device > 1.05 * wall
    text = f"device time improves {device:.2f}×, wall time {wall:.2f}×"
    return Watch("device_vs_wall", not lost, text + (": the gain does not reach the user" if lost else ""))


WATCHDOGS = (recompilation, order_effect, drift, device_beats_wall)
