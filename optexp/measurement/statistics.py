"""From samples to an interval, from an interval to a verdict. Pure functions over log-ratios ln(t_b / t_c)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, exp, hypot, inf, log, sqrt
from statistics import fmean, median, stdev

# scipy.stats has the same functions under better names, but takes 2 s to import.
from scipy.special import bdtr, ndtri, stdtr, stdtrit

from optexp.records.measurement import ProcessSpread
from optexp.records.verdict import Verdict

FARTHEST = 700.0  # largest log-ratio whose ratio a float holds
NEGLIGIBLE = 0.05  # relative widening of the interval over one process by the scatter of its blocks


@dataclass(frozen=True)
class Interval:
    """A log-ratio's estimate and confidence interval."""

    estimate: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        return (self.high - self.low) / 2

    def ratios(self) -> tuple[float, float, float]:
        """Estimate, low and high as ratios of times."""
        return exp(self.estimate), exp(self.low), exp(self.high) if self.high < FARTHEST else inf


def over_processes(log_ratios: Sequence[float], confidence: float) -> Interval:
    """Student's t-interval of the mean over processes, which includes differences between processes."""
    mean = fmean(log_ratios)
    if len(log_ratios) < 2:
        return Interval(mean, float("-inf"), float("inf"))
    t = float(stdtrit(len(log_ratios) - 1, (1 + confidence) / 2))
    half = t * stdev(log_ratios) / sqrt(len(log_ratios))
    return Interval(mean, mean - half, mean + half)


def over_blocks(log_ratios: Sequence[float], confidence: float) -> Interval:
    """The median of one process's pairs, between two order statistics (the sign test's interval).

    Differences between processes are no part of it (see `over_one_process`).
    """
    ordered, n, k = sorted(log_ratios), len(log_ratios), 0
    while bdtr(k, n, 0.5) <= (1 - confidence) / 2:  # P(at most k of n lie below the median)
        k += 1
    if k < 1:
        return Interval(median(ordered), float("-inf"), float("inf"))
    return Interval(median(ordered), ordered[k - 1], ordered[n - k])


def over_one_process(log_ratios: Sequence[float], confidence: float, spread: ProcessSpread) -> Interval:
    """The interval over one process's blocks, widened by the expected spread between processes."""
    blocks = over_blocks(log_ratios, confidence)
    t = float(stdtrit(spread.freedom, (1 + confidence) / 2))
    below, above = (
        t * hypot(half / float(ndtri((1 + confidence) / 2)), spread.deviation)
        for half in (blocks.estimate - blocks.low, blocks.high - blocks.estimate)
    )
    return Interval(blocks.estimate, blocks.estimate - below, blocks.estimate + above)


def blocks_suffice(log_ratios: Sequence[float], confidence: float, spread: ProcessSpread) -> bool:
    """Whether one process has enough blocks: the spread between processes makes nearly all of its interval.

    The decision ignores the size of the ratio, which would bias the result.
    """
    least = float(stdtrit(spread.freedom, (1 + confidence) / 2)) * spread.deviation
    return over_one_process(log_ratios, confidence, spread).half_width <= (1 + NEGLIGIBLE) * least


def interval(processes: Sequence[Sequence[float]], confidence: float, spread: ProcessSpread | None = None) -> Interval:
    """The interval over the processes' medians; for one process, over its blocks.

    processes: log-ratios of each process
    spread:    between processes, for one process
    """
    if len(processes) > 1:
        return over_processes([median(ratios) for ratios in processes], confidence)
    if spread is None:
        return over_blocks(processes[0], confidence)
    return over_one_process(processes[0], confidence, spread)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The value below which a share of sorted values lies; None where fewer than five lie beyond it."""
    beyond = min(share, 1 - share) * len(ordered)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if beyond >= 5 else None


def precise_enough(interval: Interval, half_width: float) -> bool:
    """Whether measuring may stop early; significance is never a reason, as it would bias the result."""
    return interval.half_width <= max(half_width, 0.05 * abs(interval.estimate))


def too_noisy(interval: Interval) -> bool:
    """Whether one process's blocks scatter by more than the difference that they show.

    Blocks that other programs disturb are not independent, and their interval is then too narrow.

    interval: over the blocks
    """
    return interval.high - interval.low > max(0.2, min(abs(interval.low), abs(interval.high)))


def p_value(
    processes: Sequence[Sequence[float]], min_effect: float, confidence: float, spread: ProcessSpread | None = None
) -> float:
    """The p-value of a difference beyond δ = `min_effect`, which `decide` compares by intervals.

    processes: log-ratios of each process
    spread:    between processes, for one process
    """
    margin = log(1 + min_effect)
    if len(processes) == 1 and spread is not None:
        blocks = over_blocks(processes[0], confidence)
        half = blocks.estimate - blocks.low if blocks.estimate > 0 else blocks.high - blocks.estimate
        error = hypot(half / float(ndtri((1 + confidence) / 2)), spread.deviation)
        return min(1.0, 2 * float(stdtr(spread.freedom, -(abs(blocks.estimate) - margin) / error)))
    if len(processes) == 1:
        count = max(sum(ratio > margin for ratio in processes[0]), sum(ratio < -margin for ratio in processes[0]))
        return min(1.0, 2 * float(bdtr(len(processes[0]) - count, len(processes[0]), 0.5)))
    medians = [median(ratios) for ratios in processes]
    error = stdev(medians) / sqrt(len(medians))
    beyond = abs(fmean(medians)) - margin
    return min(1.0, 2 * float(stdtr(len(medians) - 1, -beyond / error))) if error else float(beyond <= 0)


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values: the chance of any false claim among all is that of one."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def decide(interval: Interval, min_effect: float) -> Verdict:
    """FASTER or SLOWER by more than δ, SAME within it, INCONCLUSIVE otherwise."""
    _, low, high = interval.ratios()
    if low > 1 + min_effect:
        return Verdict.FASTER
    if high < 1 / (1 + min_effect):
        return Verdict.SLOWER
    if low > 1 / (1 + min_effect) and high < 1 + min_effect:
        return Verdict.SAME
    return Verdict.INCONCLUSIVE


def verdict(
    processes: Sequence[Sequence[float]], confidence: float, min_effect: float, spread: ProcessSpread | None = None
) -> tuple[Verdict, Interval]:
    """The verdict and its interval; INCONCLUSIVE for one process that was disturbed.

    processes: log-ratios of each process
    spread:    between processes, for one process
    """
    found = interval(processes, confidence, spread)
    if len(processes) == 1 and too_noisy(over_blocks(processes[0], confidence)):
        return Verdict.INCONCLUSIVE, found
    return decide(found, min_effect), found


def break_even(extra_setup_s: float, baseline_s: float, speedup: float) -> int | None:
    """Steps after which a gain has paid for the extra set-up; None: it never does."""
    gain = baseline_s * (1 - 1 / speedup)
    if gain <= 0:
        return None
    return max(0, ceil(extra_setup_s / gain))


def hours_saved(steps: int, extra_setup_s: float, baseline_s: float, speedup: float) -> float:
    """Hours that `steps` steps take less, net of set-up (negative when they take more)."""
    return (steps * baseline_s * (1 - 1 / speedup) - extra_setup_s) / 3600
