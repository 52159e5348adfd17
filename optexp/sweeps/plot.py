"""The picture of a study: a row of panels for each figure that answers it, a column for each quantity that varies."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite, nan
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib.figure import Figure  # without pyplot: no backend, no global state
from matplotlib.ticker import FuncFormatter, NullFormatter

from optexp.sweeps.study import FIGURES, Point, Study, heading

WIDTH, HEIGHT = 5.5, 3.6  # of a panel, in inches
BARS = 0.8  # of the room that a category has
LETTERS = 11  # of the question that fit an inch
TURNED = 30  # characters of all categories together, above which their names are turned


def draw(study: Study, found: Sequence[Point], path: Path) -> bool:
    """Write the picture; False where nothing was measured that it could show."""
    figures = [name for name in study.y if any(_drawable(point.value(name)) for point in found)]
    if not figures:
        return False
    rows, columns = len(figures), len(study.x)
    size = (max(WIDTH * columns, 7), HEIGHT * rows + 0.6)
    figure = Figure(figsize=size, layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False, sharey="row")
    for row, y in zip(grid, figures, strict=True):
        for axes, x in zip(row, study.x, strict=True):
            _panel(axes, study, _varying(study, found, x), x, y)
        row[0].set_ylabel(heading(y))
    figure.suptitle(fill(study.question, round(LETTERS * size[0])), fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True


def _varying(study: Study, found: Sequence[Point], x: str) -> list[Point]:
    """The points that differ from the first in `x` alone, as far as other panels are about the rest."""
    others = [name for name in study.x if name != x]
    return [point for point in found if all(point.value(name) == found[0].value(name) for name in others)]


def _panel(axes: Any, study: Study, found: Sequence[Point], x: str, y: str) -> None:
    shown = [point for point in found if _drawable(point.value(y)) and point.value(x) is not None]
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel(heading(x))
    if not shown:
        return
    if y == "shares":
        _stacked(axes, shown, [x, *([study.by] if study.by else [])])
        return
    lines: dict[str, list[Point]] = {}
    for point in shown:
        lines.setdefault(point.cell(study.by) if study.by else "", []).append(point)
    if all(isinstance(point.value(x), (int, float)) and not isinstance(point.value(x), bool) for point in shown):
        _lines(axes, lines, x, y, log="x" in study.log)
    else:
        _bars(axes, lines, x, y)
    if "y" in study.log:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    if y in FIGURES:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: FIGURES[y].show(value)))
    if y == "speedup":
        axes.axhline(1, color="black", linewidth=1)
    if study.by and len(lines) > 1:
        axes.legend(title=heading(study.by), frameon=False)


def _drawable(value: Any) -> bool:
    """A number, or shares: "never" has no height."""
    return isinstance(value, (int, float, dict)) and not isinstance(value, bool)


def _lines(axes: Any, lines: dict[str, list[Point]], x: str, y: str, log: bool) -> None:
    for label, line in lines.items():
        line.sort(key=lambda point: float(point.value(x)))
        across, up = [point.value(x) for point in line], [point.value(y) for point in line]
        axes.errorbar(across, up, yerr=_intervals(line, y), marker="o", capsize=3, label=label)
    ticks = sorted({point.value(x) for line in lines.values() for point in line})
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(ticks, [str(tick) for tick in ticks])


def _bars(axes: Any, lines: dict[str, list[Point]], x: str, y: str) -> None:
    names = list(dict.fromkeys(point.cell(x) for line in lines.values() for point in line))
    width = BARS / len(lines)
    for index, (label, line) in enumerate(lines.items()):
        at = [names.index(point.cell(x)) + (index - (len(lines) - 1) / 2) * width for point in line]
        bars = axes.bar(at, [point.value(y) for point in line], width, yerr=_intervals(line, y), capsize=3, label=label)
        axes.bar_label(bars, [point.cell(y) for point in line], fontsize=7, padding=2)
    _categories(axes, names)


def _stacked(axes: Any, found: Sequence[Point], by: Sequence[str]) -> None:
    """Where a step goes: one bar for each point, its terms in the same order."""
    names = [" · ".join(point.cell(name) for name in by) for point in found]
    terms = list(dict.fromkeys(term for point in found for term in point.value("shares")))
    below = [0.0] * len(found)
    for index, term in enumerate(terms):
        shares = [point.value("shares").get(term, 0.0) for point in found]
        colour = f"C{index % 10}"
        axes.bar(range(len(found)), shares, BARS, bottom=below, label=term, color=colour, hatch="//" * (index // 10))
        below = [low + share for low, share in zip(below, shares, strict=True)]
    _categories(axes, names)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), reverse=True)


def _categories(axes: Any, names: Sequence[str]) -> None:
    turned = {"rotation": 30, "ha": "right"} if sum(map(len, names)) > TURNED else {}
    axes.set_xticks(range(len(names)), names, **turned)


def _intervals(line: Sequence[Point], y: str) -> list[list[float]] | None:
    """A speedup's interval, as lengths below and above its estimate."""
    if y != "speedup":
        return None
    speedups = [point.result.speedup for point in line]
    return [
        [s.estimate - s.low for s in speedups if s is not None],
        [s.high - s.estimate if isfinite(s.high) else nan for s in speedups if s is not None],
    ]
