"""The strategy that is best for each workload: a sweep as sentences, a table and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path

from optexp.records import filenames
from optexp.reporting.markdown import table
from optexp.reporting.ranking import RankedRow
from optexp.result import Verdict
from optexp.support.units import at_least
from optexp.sweeps.heat_map import HeatMap

HEADS = ("verdict", "at least", "estimate", "time/step", "peak memory", "workload", "strategy")


def draw(ranked: Sequence[RankedRow], folder: Path) -> None:
    """The pictures of a ranked sweep; none where nothing was measured."""
    if any(row.speedup for row in ranked):
        (folder / filenames.HEAT_MAP).parent.mkdir(exist_ok=True)
        _bars(ranked, folder / filenames.SPEEDUPS)
        HeatMap.of(ranked).draw(folder / filenames.HEAT_MAP)


def markdown(ranked: Sequence[RankedRow]) -> str:
    """The best strategy of each workload, then all comparisons."""
    cells = [[str(r.verdict), r.at_least, r.estimate, r.time, r.memory, r.title, r.strategy] for r in ranked]
    sentences = "\n".join(f"- {line}" for line in best(ranked))
    return "\n\n".join(filter(None, [sentences, table(HEADS, cells)]))


def best(ranked: Sequence[RankedRow]) -> list[str]:
    """One sentence for each workload that was compared."""
    by_workload: dict[str, list[RankedRow]] = {}
    for row in HeatMap.of(ranked).cells.values():
        by_workload.setdefault(row.title, []).append(row)
    return [f"**{workload}**: {_winner(tried)}" for workload, tried in by_workload.items()]


def _winner(tried: Sequence[RankedRow]) -> str:
    faster = [(row.speedup.low, row) for row in tried if row.speedup and row.verdict is Verdict.FASTER]
    if not faster:
        return f"none of {len(tried)} is FASTER"
    low, row = max(faster, key=lambda found: found[0])
    return f"{row.strategy}, at least {at_least(low)}×"


def _bars(ranked: Sequence[RankedRow], path: Path) -> None:
    """Speedups with their intervals, the best on top."""
    from matplotlib.figure import Figure  # without pyplot: no backend, no global state

    bars = [(row, row.speedup) for row in ranked if row.speedup]
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for place, (row, found) in enumerate(bars):
        above = found.high - found.estimate if isfinite(found.high) else nan
        colour = "#2e7d32" if row.verdict is Verdict.FASTER else "#9e9e9e"
        axes.barh(place, found.estimate, color=colour, xerr=[[found.estimate - found.low], [above]], capsize=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [row.label for row, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("speedup over the baseline, with its interval")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")
