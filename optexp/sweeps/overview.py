"""Which strategy is best for which workload: a sweep as one line for each workload, a heat map, and bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite, log2, nan
from pathlib import Path

from optexp.records import filenames
from optexp.reporting import summary
from optexp.reporting.markdown import table
from optexp.reporting.titles import titles
from optexp.result import Result, Verdict
from optexp.support.units import at_least, ratio

HEADS = ("verdict", "at least", "estimate", "time/step", "peak memory", "workload", "strategy")
WORDS = {Verdict.NOT_EQUIVALENT: "NOT\nEQUIVALENT", Verdict.NOT_ENGAGED: "NOT\nENGAGED"}
MEASURED = {Verdict.FASTER: "Greens", Verdict.SLOWER: "Reds"}  # darker with the ratio
COLOURS = {Verdict.SAME: "#e8eaf6", Verdict.INCONCLUSIVE: "#fff8e1", Verdict.UNSUPPORTED: "#f5f5f5"}
OTHER = "#d7ccc8"
DARKEST = 8.0  # ratio with the darkest colour


def draw(results: Sequence[Result], folder: Path) -> None:
    """The pictures of a ranked sweep; none where nothing was measured."""
    if any(result.speedup for result in results):
        (folder / filenames.HEAT_MAP).parent.mkdir(exist_ok=True)
        _bars(results, folder / filenames.SPEEDUPS)
        _heat_map(cells(results), folder / filenames.HEAT_MAP)


def markdown(results: Sequence[Result]) -> str:
    """The best strategy of each workload, then all comparisons."""
    return "\n\n".join(["\n".join(f"- {line}" for line in best(results)), table(HEADS, _rows(results))])


def best(results: Sequence[Result]) -> list[str]:
    """One sentence for each workload."""
    by_workload: dict[str, list[Result]] = {}
    for (workload, _), result in cells(results).items():
        by_workload.setdefault(workload, []).append(result)
    return [f"**{workload}**: {_winner(tried)}" for workload, tried in by_workload.items()]


def _winner(tried: Sequence[Result]) -> str:
    faster = [(r.speedup.low, r) for r in tried if r.speedup and r.verdict is Verdict.FASTER]
    if not faster:
        return f"none of {len(tried)} is FASTER"
    low, result = max(faster, key=lambda found: found[0])
    return f"{result.label}, at least {at_least(low)}×"


def cells(results: Sequence[Result]) -> dict[tuple[str, str], Result]:
    """The first result of each workload with its settings, and each strategy."""
    found: dict[tuple[str, str], Result] = {}
    for result, title in zip(results, titles(results), strict=True):
        found.setdefault((title, result.label), result)
    return found


def _rows(results: Sequence[Result]) -> list[list[str]]:
    rows = []
    for result, title in zip(results, titles(results), strict=True):
        speedup, arm = result.speedup, summary.shown(result)
        known = speedup if result.verdict is not Verdict.INCONCLUSIVE else None
        rows.append([
            str(result.verdict),
            f"{at_least(known.low)}×" if known else "",
            ratio(speedup.estimate) if speedup else "",
            summary.microseconds(arm.step_us) if arm.step_us else "",
            summary.mebibytes(arm.peak_mib) if arm.peak_mib else "",
            title,
            result.label,
        ])  # fmt: skip
    return rows


def _bars(results: Sequence[Result], path: Path) -> None:
    """Speedups with their intervals, the best on top."""
    from matplotlib.figure import Figure  # without pyplot: no backend, no global state

    named = zip(results, titles(results), strict=True)
    bars = [(f"{title} · {result.label}", result.verdict, result.speedup) for result, title in named if result.speedup]
    figure = Figure(figsize=(8, 1.2 + 0.4 * len(bars)), layout="constrained")
    axes = figure.subplots()
    for place, (_, verdict, found) in enumerate(bars):
        above = found.high - found.estimate if isfinite(found.high) else nan
        colour = "#2e7d32" if verdict is Verdict.FASTER else "#9e9e9e"
        axes.barh(place, found.estimate, color=colour, xerr=[[found.estimate - found.low], [above]], capsize=3)
    axes.axvline(1, color="black", linewidth=1)
    axes.set_yticks(range(len(bars)), [label for label, _, _ in bars])
    axes.invert_yaxis()
    axes.set_xlabel("speedup over the baseline, with its interval")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def _heat_map(found: Mapping[tuple[str, str], Result], path: Path) -> None:
    """Workloads by strategies; a cell has the verdict, and the ratio where it is known."""
    from matplotlib.figure import Figure  # without pyplot: no backend, no global state
    from matplotlib.patches import Rectangle

    workloads, strategies = (list(dict.fromkeys(key[axis] for key in found)) for axis in (0, 1))
    figure = Figure(figsize=(2.5 + 1.5 * len(strategies), 1.2 + 0.7 * len(workloads)), layout="constrained")
    axes = figure.subplots()
    for (workload, strategy), result in found.items():
        x, y = strategies.index(strategy), workloads.index(workload)
        colour, dark = _colour(result)
        axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=colour, edgecolor="white", linewidth=2))
        axes.text(x, y, _text(result), ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axes.set_xlim(-0.5, len(strategies) - 0.5)
    axes.set_ylim(len(workloads) - 0.5, -0.5)
    axes.set_xticks(range(len(strategies)), strategies, rotation=30 if len(strategies) > 4 else 0)
    axes.set_yticks(range(len(workloads)), workloads)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    figure.savefig(path, dpi=120)


def _colour(result: Result) -> tuple[str | tuple[float, float, float, float], bool]:
    """Of a cell, and whether it is dark."""
    from matplotlib import colormaps

    if result.speedup is None or result.verdict not in MEASURED:
        return COLOURS.get(result.verdict, OTHER), False
    share = min(1.0, abs(log2(result.speedup.estimate)) / log2(DARKEST))
    return colormaps[MEASURED[result.verdict]](0.25 + 0.65 * share), share > 0.5


def _text(result: Result) -> str:
    word = WORDS.get(result.verdict, str(result.verdict))
    if result.speedup is None:
        return word
    if result.verdict is Verdict.FASTER:
        return f"{word}\n≥ {at_least(result.speedup.low)}×"
    return word if result.verdict is Verdict.INCONCLUSIVE else f"{word}\n{ratio(result.speedup.estimate)}"
