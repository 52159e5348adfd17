"""Bounds beside measurements: how far below what was predicted at most each comparison's speedup is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from optexp.records.prediction import ABOVE
from optexp.reporting import markdown
from optexp.support.units import ratio

NEAR = 1.3  # a measurement within this factor of its bound
HEADS = ("workload", "strategy", "verdict", "predicted at most", "measured", "measured/bound")


@dataclass(frozen=True)
class Bound:
    """A measured comparison.

    measured:  its speedup
    predicted: the largest speedup that its bound allows; None where the strategy has no bound
    """

    workload: str
    strategy: str
    verdict: str
    measured: float
    predicted: float | None

    @property
    def of_bound(self) -> float:
        """Measured over predicted; -1 without a bound."""
        return self.measured / self.predicted if self.predicted else -1.0


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """One row for each comparison, those nearest to their bound first; `–` where a strategy knows no bound.

    rows: fields of `Bound`
    """
    ordered = sorted((Bound(**row) for row in rows), key=lambda pair: pair.of_bound, reverse=True)
    ratios = [pair.of_bound for pair in ordered if pair.predicted]
    return f"{summary(ratios, len(ordered))}\n\n{markdown.table(HEADS, [cells(pair) for pair in ordered])}"


def cells(pair: Bound) -> list[str]:
    named = [f"`{pair.workload}`", f"`{pair.strategy}`", pair.verdict]
    if not pair.predicted:
        return [*named, "–", ratio(pair.measured), "–"]
    beyond = " **beyond**" if pair.of_bound > ABOVE else ""
    return [*named, ratio(pair.predicted), ratio(pair.measured), f"{pair.of_bound:.2f}{beyond}"]


def summary(ratios: Sequence[float], comparisons: int) -> str:
    """Shares of the comparisons that have a bound."""
    if not ratios:
        return f"None of {comparisons} comparisons has a bound."
    within = sum(value <= ABOVE for value in ratios)
    near = sum(1 / NEAR <= value <= NEAR for value in ratios)
    count = len(ratios)
    return (
        f"{count} of {comparisons} comparisons have a bound. Measured/bound is at most {ABOVE:g} in {within} of {count}"
        f" ({within / count:.0%}), and within a factor of {NEAR:g} of 1 in {near} of {count} ({near / count:.0%})."
    )
