"""Intervals of sums and differences of log-ratios from separate measurements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import hypot, inf, sqrt
from statistics import fmean, median, stdev

from scipy.special import ndtri, stdtrit

from optexp.measurement.statistics import Interval, interval, over_blocks
from optexp.records.measurement import ProcessSpread


@dataclass(frozen=True)
class Uncertain:
    """A mean log-ratio with its standard error, and the degrees of freedom of that error.

    shown: confidence and interval that a comparison's report shows; None for a combination of several
    """

    estimate: float
    error: float
    freedom: float
    shown: tuple[float, Interval] | None = None

    def interval(self, confidence: float) -> Interval:
        """The comparison's own interval if it has one; else Student's t-interval, infinite where the error is."""
        if self.shown is not None and self.shown[0] == confidence:
            return self.shown[1]
        if not self.error:
            return Interval(self.estimate, self.estimate, self.estimate)
        if self.error == inf:
            return Interval(self.estimate, -inf, inf)
        half = float(stdtrit(self.freedom, (1 + confidence) / 2)) * self.error
        return Interval(self.estimate, self.estimate - half, self.estimate + half)


EQUAL = Uncertain(0.0, 0.0, inf)  # a program compared with itself


def of_processes(
    processes: Sequence[Sequence[float]], confidence: float, spread: ProcessSpread | None = None
) -> Uncertain:
    """The mean of log-ratios by process, with the estimate and interval of `statistics.interval`.

    Args:
        confidence: Confidence of the interval over blocks, where there is one process.
        spread: Expected spread between processes, where only one was measured.
    """
    if len(processes) > 1:
        medians = [median(ratios) for ratios in processes]
        return Uncertain(fmean(medians), stdev(medians) / sqrt(len(medians)), len(medians) - 1)
    shown = confidence, interval(processes, confidence, spread)
    blocks = over_blocks(processes[0], confidence)
    error = blocks.half_width / float(ndtri((1 + confidence) / 2))
    if spread is None:
        return Uncertain(blocks.estimate, error, max(len(processes[0]) - 1, 1), shown)
    return Uncertain(blocks.estimate, hypot(error, spread.deviation), spread.freedom, shown)


def combined(terms: Iterable[tuple[float, Uncertain]]) -> Uncertain:
    """Σ weight · value of independent values; degrees of freedom by Welch and Satterthwaite."""
    parts = [(weight, value) for weight, value in terms if weight and value is not EQUAL]
    if len(parts) == 1 and parts[0][0] == 1:
        return parts[0][1]
    estimate = sum(weight * value.estimate for weight, value in parts)
    variances = [((weight * value.error) ** 2, value.freedom) for weight, value in parts if value.error]
    total = sum(variance for variance, _ in variances)
    if not total or total == inf:
        return Uncertain(estimate, sqrt(total), inf if not total else 1.0)
    share = sum(variance**2 / freedom for variance, freedom in variances)
    return Uncertain(estimate, sqrt(total), total**2 / share)
