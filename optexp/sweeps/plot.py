"""The picture of a study: a panel for each figure that answers and each quantity that varies, the reasons below."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from matplotlib import rc_context
from matplotlib.figure import Figure  # without pyplot: no backend, no global state

from optexp.sweeps.figures import Point, heading
from optexp.sweeps.panels import Panel, drawable, label
from optexp.sweeps.study import Study

WIDTH = 5.5  # of a panel, in inches
NARROW = 4.6  # of a panel in a page: its letters are to be read on a phone
WIDEST = 15.0  # of a picture, in inches
BESIDE = 2  # panels of one quantity in a row
LETTERS = 12  # of the question that fit an inch
LINE = 0.165  # of what is told below, in inches
NAMED = 6  # points of one reason
TOLD = 15.5  # its letters that fit an inch
OWN = {  # colours of a page
    "#000000": "currentColor", "#ffffff": "var(--card)", "#444444": "var(--soft)", "#555555": "var(--soft)",
    "#666666": "var(--soft)", "#777777": "var(--soft)",
}  # fmt: skip
SVG: Any = {"svg.fonttype": "none", "svg.hashsalt": "optexp"}  # text stays text; the same data gives the same bytes


def draw(study: Study, found: Sequence[Point], path: Path) -> bool:
    """Write the picture; False where nothing was measured that it could show."""
    rows = panels(study, found)
    if not rows:
        return False
    columns = max(map(len, rows))
    width = max(min(WIDTH, WIDEST / columns) * columns, 8.0)
    told = [fill(line, round(TOLD * width), subsequent_indent="      ") for line in tell(study, found)]
    below = LINE * sum(text.count("\n") + 1 for text in told) + 0.1 if told else 0.0
    heights = [max(panel.height for panel in row) for row in rows] + ([below] if told else [])
    figure = Figure(figsize=(width, sum(heights) + 0.7), layout="constrained")
    grid = figure.add_gridspec(len(heights), columns, height_ratios=heights)
    for number, row in enumerate(rows):
        ends = shared(row)
        for column, panel in enumerate(row):
            last = column == len(row) - 1
            axes = figure.add_subplot(grid[number, column:] if last else grid[number, column])
            panel.draw(axes, ends)
            if panel.numeric and not (ends and column):
                axes.set_ylabel(panel.title)
    if told:
        _text(figure.add_subplot(grid[-1, :]), told)
    figure.suptitle(fill(study.question, round(LETTERS * width)), fontsize=11, fontweight="bold")
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context(SVG):
        figure.savefig(path, dpi=120, metadata={"Date": None} if path.suffix == ".svg" else None)
    return True


def as_svg(study: Study, found: Sequence[Point]) -> list[str]:
    """Each panel as SVG for a page, whose colours of text, lines and card it takes over."""
    drawn = []
    for row in panels(study, found):
        ends = shared(row)
        for panel in row:
            figure = Figure(figsize=(NARROW, panel.height), layout="constrained")
            panel.draw(axes := figure.subplots(), ends)
            if panel.numeric:
                axes.set_title(panel.title, fontsize=9, loc="left")
            text = io.StringIO()
            with rc_context(SVG):
                figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
            drawn.append(themed(text.getvalue()))
    return drawn


def themed(svg: str) -> str:
    """An SVG without its frame and its fixed black and white."""
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(
        r'(<svg[^>]*?) width="[^"]*"', r"\1", re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1), count=1
    )
    for fixed, own in OWN.items():
        svg = svg.replace(fixed, own)
    return svg


def panels(study: Study, found: Sequence[Point]) -> list[list[Panel]]:
    """Rows of panels: one for each figure where several quantities vary, else figures side by side."""
    figures = [name for name in study.y if any(drawable(point.value(name)) for point in found)]
    every = [[Panel(study, varying(study, found, x), found, x, y) for x in study.x] for y in figures]
    if len(study.x) > 1:
        return every
    flat = [panel for (panel,) in every]
    beside = BESIDE if all(panel.numeric for panel in flat) else 1
    return [flat[start : start + beside] for start in range(0, len(flat), beside)]


def varying(study: Study, found: Sequence[Point], x: str) -> list[Point]:
    """The points that differ from the first in `x` alone, as far as other panels are about the rest."""
    others = [name for name in study.x if name != x]
    return [point for point in found if all(point.value(name) == found[0].value(name) for name in others)]


def tell(study: Study, found: Sequence[Point]) -> list[str]:
    """Lines below the picture: each figure in words, with its points."""
    lines = []
    for name in study.tell:
        said: dict[str, list[str]] = {}
        for point in found:
            if (text := point.cell(name)) and not (point.arm == "baseline" and point.result.strategy):
                said.setdefault(text, []).append(label(point, _apart(study, found)))
        lines += [f"{heading(name)}:"] * bool(said)
        lines += [f"   {_several(list(dict.fromkeys(points)))}: {text}" for text, points in said.items()]
    return lines


def _several(names: Sequence[str]) -> str:
    """Names in a row, at most about six."""
    rest = len(names) - NAMED
    return ", ".join(names) if rest <= 1 else f"{', '.join(names[:NAMED])} and {rest} more"


def _apart(study: Study, found: Sequence[Point]) -> list[str]:
    """The names of the study that have several values: they tell points apart."""
    named = dict.fromkeys([*study.x, *study.by])
    return [name for name in named if len({point.cell(name) for point in found}) > 1]


def shared(row: Sequence[Panel]) -> tuple[float, float] | None:
    """The ends of an axis that all panels of a row have; None where each has its own."""
    if len({panel.y for panel in row}) > 1 or not all(panel.numeric and panel.y != "shares" for panel in row):
        return None
    ends = [panel.ends() for panel in row if panel.drawn]
    return min(low for low, _ in ends), max(high for _, high in ends)


def _text(axes: Any, lines: Sequence[str]) -> None:
    axes.axis("off")
    axes.annotate("\n".join(lines), (0.02, 1), xycoords=("figure fraction", "axes fraction"), va="top", fontsize=8)
