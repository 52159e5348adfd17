"""Plots of a report as positions in pixels, drawn as SVG by templates: importing a plotting library takes a second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from optexp.equivalence.tensor_math import SPREAD
from optexp.records.measurement import Measurement
from optexp.reporting import timeline
from optexp.reporting.timeline import Tick
from optexp.result import Result
from optexp.support import units

WIDTH, MARGIN, ROW = 720, 24, 22  # of the strip plot, in pixels
ERRORS = 180  # height of the plot of errors, in pixels


# --- the distribution of errors --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Errors:
    """A tensor's errors in both arms, in pixels.

    lines: by arm, points of a polyline
    exact: by arm, share of elements without an error, in words; arms with such elements only
    """

    tensor: str
    width: int
    height: int
    bottom: int
    lines: dict[str, str]
    exact: dict[str, str]
    ticks: list[Tick]


def errors(result: Result) -> Errors | None:
    """The histograms of a tensor's errors in both arms (see `optexp.equivalence.tensor_math.histogram`), as lines."""
    found = result.equivalence.distribution if result.equivalence else None
    if found is None:
        return None
    low, high, parts = SPREAD
    arms = {"baseline": found.baseline, "candidate": found.candidate}
    if all(max(shares) == 1 for shares in arms.values()):  # one element, or none that differs from another
        return None
    used = [index for index in range(parts) if any(shares[1 + index] for shares in arms.values())]
    if not used:
        return None
    first, last = max(used[0] - 1, 0), min(used[-1] + 1, parts - 1)
    tallest = max(max(shares[1:]) for shares in arms.values())
    bottom = ERRORS - 26

    def x(index: float) -> float:
        return round(MARGIN + (index - first) / max(last - first, 1) * (WIDTH - 2 * MARGIN), 1)

    lines = {
        name: " ".join(f"{x(i)},{bottom - shares[1 + i] / tallest * (bottom - 10):.1f}" for i in range(first, last + 1))
        for name, shares in arms.items()
    }
    per_decade = parts / (high - low)
    decades = [d for d in range(int(low), int(high) + 1) if first <= (d - low) * per_decade <= last]
    return Errors(
        tensor=found.tensor,
        width=WIDTH,
        height=ERRORS,
        bottom=bottom,
        lines=lines,
        exact={name: units.share(shares[0]) for name, shares in arms.items() if shares[0]},
        ticks=[(x((decade - low) * per_decade), f"1e{decade}") for decade in decades],
    )


# --- the distribution of ratios --------------------------------------------------------------------------------


@dataclass(frozen=True)
class StripRow:
    """One process: its mean ratio, and a dot for each pair, in pixels."""

    y: int
    mean: float
    dots: list[float]
    dropped: list[float]


@dataclass(frozen=True)
class Strip:
    """Ratios by process, in pixels.

    low, high, estimate: of the speedup
    one:                 a ratio of 1; None outside the plot
    """

    width: int
    height: int
    bottom: int
    low: float
    high: float
    estimate: float
    one: float | None
    ticks: list[Tick]
    rows: list[StripRow]


def strip(result: Result) -> Strip | None:
    """Positions, in pixels, of every pair's ratio by process, each process's mean, and the interval over them."""
    measured = result.measurement or Measurement()
    pairs, means = measured.pairs, [math.exp(process.log_ratio) for process in measured.processes]
    speedup = result.speedup
    if speedup is None or not means or len(pairs) != len(means):
        return None
    ratios = [[before / after for before, after in process] for process in pairs]
    lost = [[before / after for before, after in process] for process in measured.dropped]
    keep = [*means, *filter(math.isfinite, (speedup.low, speedup.high))]
    ends = _without_outliers([*(ratio for process in (*ratios, *lost) for ratio in process), *keep], keep)
    low, high = ends[0] - 0.04 * (ends[1] - ends[0]), ends[1] + 0.04 * (ends[1] - ends[0])

    def x(ratio: float) -> float:
        return round(MARGIN + (min(max(ratio, low), high) - low) / (high - low) * (WIDTH - 2 * MARGIN), 1)

    return Strip(
        width=WIDTH,
        height=ROW * len(means) + 56,
        bottom=ROW * len(means) + 26,
        low=x(speedup.low),
        high=x(speedup.high),
        estimate=x(speedup.estimate),
        one=x(1.0) if low <= 1 <= high else None,
        ticks=[(x(tick), f"{tick:.{places}f}×") for tick, places in timeline.ticks(low, high)],
        rows=[
            StripRow(ROW * index + 20, x(mean), [x(ratio) for ratio in process], [x(ratio) for ratio in dropped])
            for index, (mean, process, dropped) in enumerate(zip(means, ratios, lost or [[]] * len(means), strict=True))
        ],
    )


def _without_outliers(values: Sequence[float], keep: Sequence[float]) -> tuple[float, float]:
    """The range that shows 98 % of the values and all that must be seen; single pairs beyond it sit on its edge."""
    ordered = sorted(values)
    cut = len(ordered) // 100
    low = min(ordered[cut], *keep)
    high = max(ordered[-1 - cut], *keep)
    return (low, high) if high > low else (low * 0.99, high * 1.01)
