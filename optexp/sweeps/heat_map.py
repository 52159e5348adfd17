"""Verdicts of a sweep by workload and strategy: cells for the page, and the same cells as a picture for MLflow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import log2
from pathlib import Path
from typing import Any

from optexp.reporting.ranking import RankedRow
from optexp.result import Verdict
from optexp.support.units import at_least

WORDS = {Verdict.NOT_EQUIVALENT: "NOT\nEQUIVALENT", Verdict.NOT_ENGAGED: "NOT\nENGAGED"}
MEASURED = {Verdict.FASTER: "Greens", Verdict.SLOWER: "Reds"}  # darker with the ratio
COLOURS = {Verdict.SAME: "#e8eaf6", Verdict.INCONCLUSIVE: "#fff8e1", Verdict.UNSUPPORTED: "#f5f5f5"}
OTHER = "#d7ccc8"
DARKEST = 8.0  # ratio with the darkest colour


@dataclass(frozen=True)
class HeatMap:
    """The best job of each workload with each strategy.

    cells: by a row's title and strategy; a pair that no job had is missing
    """

    workloads: list[str]
    strategies: list[str]
    cells: Mapping[tuple[str, str], RankedRow]

    @classmethod
    def of(cls, ranked: Sequence[RankedRow]) -> HeatMap:
        """The map of rows, the best first. Programs that were profiled alone are left out."""
        cells: dict[tuple[str, str], RankedRow] = {}
        for row in ranked:
            if row.verdict is not Verdict.PROFILED:
                cells.setdefault((row.title, row.strategy), row)
        workloads, strategies = ([*dict.fromkeys(key[axis] for key in cells)] for axis in (0, 1))
        return cls(workloads, strategies, cells)

    @property
    def varies_both_ways(self) -> bool:
        """Whether there are several workloads and several strategies."""
        return len(self.workloads) > 1 and len(self.strategies) > 1

    def ratio(self, workload: str, strategy: str) -> str:
        """The speedup in a cell; empty where nothing follows from it."""
        row = self.cells[workload, strategy]
        if row.speedup is None or row.verdict is Verdict.INCONCLUSIVE:
            return ""
        return f"≥ {at_least(row.speedup.low)}×" if row.verdict is Verdict.FASTER else row.estimate

    def draw(self, path: Path) -> None:
        """Write the map as a picture."""
        from matplotlib.figure import Figure  # without pyplot: no backend, no global state

        size = (2.5 + 1.5 * len(self.strategies), 1.2 + 0.7 * len(self.workloads))
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        for x, strategy in enumerate(self.strategies):
            for y, workload in enumerate(self.workloads):
                if (row := self.cells.get((workload, strategy))) is not None:
                    text = "\n".join([WORDS.get(row.verdict, row.verdict), self.ratio(workload, strategy)]).rstrip()
                    _draw_cell(axes, x, y, row, text)
        axes.set_xlim(-0.5, len(self.strategies) - 0.5)
        axes.set_ylim(len(self.workloads) - 0.5, -0.5)
        axes.set_xticks(range(len(self.strategies)), self.strategies, rotation=30 if len(self.strategies) > 4 else 0)
        axes.set_yticks(range(len(self.workloads)), self.workloads)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        figure.savefig(path, dpi=120)


def _draw_cell(axes: Any, x: int, y: int, row: RankedRow, text: str) -> None:
    from matplotlib import colormaps
    from matplotlib.patches import Rectangle

    colour: Any = COLOURS.get(row.verdict, OTHER)
    dark = False
    if row.speedup is not None and row.verdict in MEASURED:
        share = min(1.0, abs(log2(row.speedup.estimate)) / log2(DARKEST))
        colour, dark = colormaps[MEASURED[row.verdict]](0.25 + 0.65 * share), share > 0.5
    axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
    axes.text(x, y, text, ha="center", va="center", fontsize=8, color="white" if dark else "black")
