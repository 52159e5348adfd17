"""One panel of a study's picture: lines over a number, bars beside words, or the terms of a step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import isfinite
from typing import Any

from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from optexp.result import Verdict
from optexp.sweeps.figures import FIGURES, Point, heading
from optexp.sweeps.study import Study

BAR, HEIGHT = 0.3, 3.3  # inches: of a bar with its room, and of a panel with lines
SHORT = 46  # characters of a verdict where a bar would stand, if they have room
LETTER = 0.066  # inches: its width, in the smallest print
UNDECIDED = "undecided"
DECIDED = ("speedup", "step_us", "throughput")  # what verdicts are about
BASELINE, CANDIDATE = "baseline", "candidate"
COLOURS: Mapping[str, str] = {
    BASELINE: "#9aa3ad",
    CANDIDATE: "#3b82d6",
    Verdict.FASTER: "#2da44e",
    Verdict.SLOWER: "#d1242f",
    Verdict.SAME: "#3b82d6",
    Verdict.PROFILED: "#3b82d6",
}


@dataclass(frozen=True)
class Panel:
    """points: of this panel, also points without a figure to draw;  every: the study's points, for one unit"""

    study: Study
    points: Sequence[Point]
    every: Sequence[Point]
    x: str
    y: str

    @property
    def drawn(self) -> list[Point]:
        return [p for p in self.points if drawable(p.value(self.y)) and p.value(self.x) is not None]

    @property
    def numeric(self) -> bool:
        """Whether `x` is a number, so that lines can be drawn over it."""
        values = [point.value(self.x) for point in self.drawn]
        return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)

    @property
    def height(self) -> float:
        """In inches."""
        return HEIGHT if self.numeric else 0.9 + BAR * len(self.points)

    @property
    def scale(self) -> tuple[str, float]:
        """The unit of the axis, and its size: one for all ticks, so that no axis of milliseconds holds a 0 µs."""
        units = FIGURES[self.y].units if self.y in FIGURES else ()
        values = [point.value(self.y) for point in self.every]
        highest = max((abs(value) for value in values if isinstance(value, (int, float))), default=0.0)
        return next(((unit, size) for unit, size in units if highest >= size), units[-1] if units else ("", 1.0))

    @property
    def title(self) -> str:
        unit = self.scale[0]
        return f"{heading(self.y)}, {unit}" if unit not in ("", "×") else heading(self.y)

    def ends(self) -> tuple[float, float]:
        """The lowest and the highest value that is drawn, intervals included, in the axis' unit."""
        size, every = self.scale[1], [1.0] if self.y == "speedup" else list[float]()
        for point in self.drawn:
            every += [point.value(self.y), *filter(isfinite, point.interval(self.y) or ())]
        return min(every, default=0.0) / size, max(every, default=1.0) / size

    def draw(self, axes: Any, ends: tuple[float, float] | None = None) -> None:
        """ends: of the axis, where panels beside this one share it"""
        axes.spines[["top", "right"]].set_visible(False)
        if not self.drawn:
            axes.axis("off")
        elif self.y == "shares":
            _stacked(axes, self)
        elif self.numeric:
            _lines(axes, self, ends or self.ends())
        else:
            _bars(axes, self)


def drawable(value: Any) -> bool:
    """A number, or shares: "never" has no height."""
    return isinstance(value, (int, float, dict)) and not isinstance(value, bool)


def label(point: Point, names: Iterable[str]) -> str:
    """A point's name, without values that another part has in brackets: fusion[backend=eager] has eager."""
    parts = [cell for name in names if (cell := point.cell(name))]
    return " · ".join(part for part in parts if not any(f"={part}]" in other for other in parts))


def _outside(point: Point, panel: Panel) -> tuple[float, float] | None:
    """Lengths of an error bar below and above the value, in the axis' unit."""
    found, value = point.interval(panel.y), point.value(panel.y)
    if found is None:
        return None
    low, high = found
    return max(value - low, 0.0) / panel.scale[1], max(high - value, 0.0) / panel.scale[1] if isfinite(high) else 0.0


# --- lines -----------------------------------------------------------------------------------------------------


def _lines(axes: Any, panel: Panel, ends: tuple[float, float]) -> None:
    size, study, drawn = panel.scale[1], panel.study, panel.drawn
    every = list(dict.fromkeys(label(point, study.by) for point in panel.every))
    for name, line in by_label(panel).items():
        line.sort(key=lambda point: float(point.value(panel.x)))
        across, up = [p.value(panel.x) for p in line], [p.value(panel.y) / size for p in line]
        (shown,) = axes.plot(across, up, marker="o", label=name, linewidth=1.6, color=f"C{every.index(name) % 10}")
        for point, x, y in zip(line, across, up, strict=True):
            if point.doubtful(panel.y):
                axes.plot(x, y, "o", color=shown.get_color(), markerfacecolor="white", zorder=3)
            if (lengths := _outside(point, panel)) is not None:
                bar = [[lengths[0]], [lengths[1]]]
                axes.errorbar(x, y, yerr=bar, capsize=3, color=shown.get_color(), linestyle="none")
    if panel.y == "speedup":
        axes.axhline(1, color="black", linewidth=1)
    if panel.y == "of_ceiling":
        axes.axhline(100, color="black", linewidth=1, linestyle=":")
    _across(axes, panel, sorted({point.value(panel.x) for point in drawn}))
    _up(axes, study, ends)
    handles, _ = axes.get_legend_handles_labels()
    handles = handles if len(handles) > 1 or study.by else []
    if any(point.doubtful(panel.y) for point in drawn):
        handles.append(
            Line2D([], [], marker="o", linestyle="none", color="#555", markerfacecolor="white", label=UNDECIDED)
        )
    if handles:
        below = {"loc": "upper left", "bbox_to_anchor": (0, -0.16), "ncols": 4}  # where it hides no point
        title = " · ".join(map(heading, study.by))
        axes.legend(handles=handles, title=title, frameon=False, fontsize=8, title_fontsize=8, **below)


def by_label(panel: Panel) -> dict[str, list[Point]]:
    """The points of each line."""
    lines: dict[str, list[Point]] = {}
    for point in panel.drawn:
        lines.setdefault(label(point, panel.study.by), []).append(point)
    return lines


def _across(axes: Any, panel: Panel, ticks: Sequence[float]) -> None:
    axes.set_xlabel(heading(panel.x))
    if "x" in panel.study.log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xticks(ticks, [f"{tick:g}" if tick < 1e5 else f"{tick:,.0f}" for tick in ticks])


def _up(axes: Any, study: Study, ends: tuple[float, float]) -> None:
    low, high = ends
    if "y" in study.log and low > 0:
        axes.set_yscale("log")
        axes.set_ylim(0.8 * low, 1.25 * high)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_ylim(0, 1.15 * high if high > 0 else 1)


# --- bars ------------------------------------------------------------------------------------------------------


def _bars(axes: Any, panel: Panel) -> None:
    """A bar for each point, from the left, so that names need no turning and no breaking."""
    size, names = panel.scale[1], _names(panel)
    for place, point in enumerate(panel.points):
        value = point.value(panel.y)
        if not drawable(value):
            _beside(axes, 0.0, place, _instead(point, _room(axes, names)), color="#666", style="italic")
            continue
        kind = _kind(point, panel.y)
        hatched = {"facecolor": "white", "edgecolor": "#777", "hatch": "////"}
        lengths = _outside(point, panel)
        error = {"xerr": [[lengths[0]], [lengths[1]]], "capsize": 3, "ecolor": "#444"} if lengths else {}
        axes.barh(place, value / size, 0.7, **(hatched if kind == UNDECIDED else {"color": COLOURS[kind]}), **error)
        _beside(axes, value / size + (lengths[1] if lengths else 0.0), place, _said(point, panel.y))
    axes.set_yticks(range(len(panel.points)), names, fontsize=8)
    axes.set_ylim(len(panel.points) - 0.4, -0.6)
    highest = panel.ends()[1]
    axes.set_xlim(0, 1.75 * highest if highest > 0 else 1)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_xlabel(panel.title, fontsize=9, loc="left")
    if panel.y == "speedup":
        axes.axvline(1, color="black", linewidth=1, zorder=0.5)
    kinds = dict.fromkeys(_kind(point, panel.y) for point in panel.drawn)
    if len(kinds) > 1:
        axes.legend(
            handles=[*map(_legend, kinds)],
            frameon=False,
            fontsize=8,
            loc="lower left",
            bbox_to_anchor=(0, 1),
            ncols=4,
            borderpad=0,
        )


def _beside(axes: Any, x: float, place: float, text: str, **style: str) -> None:
    axes.annotate(text, (x, place), (4, 0), textcoords="offset points", va="center", fontsize=8, **style)


def _legend(kind: str) -> Patch:
    if kind == UNDECIDED:
        return Patch(facecolor="white", edgecolor="#777", hatch="////", label=kind)
    return Patch(color=COLOURS[kind], label=kind)


def _room(axes: Any, names: Sequence[str]) -> int:
    """Letters that fit between the names and the right edge."""
    inches = axes.figure.get_figwidth() / axes.get_subplotspec().get_gridspec().ncols
    return min(SHORT, int(inches / LETTER) - max(map(len, names)) - 5)


def _instead(point: Point, room: int) -> str:
    """Where a bar would stand: the verdict, and what it found or why it found nothing."""
    found = " ".join(filter(None, (point.verdict or "not measured", point.cell("speedup"))))
    return found if len(found) <= room else f"{found[: room - 1]}…"


def _names(panel: Panel) -> list[str]:
    """Of bars: what varies, said once where bars of one value stand together, and what tells bars apart."""
    named = []
    for value, group in groupby(panel.points, key=lambda point: point.cell(panel.x)):
        for number, point in enumerate(group):
            apart = label(point, [name for name in panel.study.by if name != panel.x])
            named.append(apart if number and apart else " · ".join(filter(None, (value, apart))))
    return named


def _said(point: Point, y: str) -> str:
    """A bar's value; the speedup beside it where that is not the bar."""
    ratio = point.cell("speedup") if y in ("step_us", "throughput") and point.arm == "candidate" else ""
    return "   ".join(filter(None, (point.cell(y), ratio)))


def _kind(point: Point, y: str) -> str:
    """The meaning of a bar's colour: the verdict if `y` decides it, else the arm."""
    if point.doubtful(y):
        return UNDECIDED
    if point.arm == "baseline" and point.result.verdict is not Verdict.PROFILED:
        return BASELINE
    return str(point.result.verdict) if y in DECIDED and point.result.verdict in COLOURS else CANDIDATE


# --- terms of a step -------------------------------------------------------------------------------------------


def _stacked(axes: Any, panel: Panel) -> None:
    """Where a step goes: one bar for each point, its terms in the same order."""
    found = panel.drawn
    terms = list(dict.fromkeys(term for point in found for term in point.value("shares")))
    below = [0.0] * len(found)
    for index, term in enumerate(terms):
        shares = [100 * point.value("shares").get(term, 0.0) for point in found]
        axes.barh(
            range(len(found)), shares, 0.7, left=below, label=term, color=f"C{index % 10}", hatch="//" * (index // 10)
        )
        below = [low + share for low, share in zip(below, shares, strict=True)]
    names = [label(point, [panel.x, *panel.study.by]) for point in found]
    axes.set_yticks(range(len(found)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 100)
    axes.tick_params(axis="x", labelsize=8)
    axes.set_title(panel.title, fontsize=9, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
