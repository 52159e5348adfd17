"""The waterfall of a search or an ablation: what is left of the baseline's after each step, as bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path

from optexp.records import filenames
from optexp.records.trials import Gain, kept
from optexp.result import Result, Verdict
from optexp.support.units import joules, low_to_high, mebibytes, microseconds, ratio

FIGURES: Mapping[str, tuple[Callable[[float], str], str]] = {  # by objective: how it is shown, and its field
    "memory": (mebibytes, "peak_mib"),
    "energy": (joules, "energy_j"),
}
WIDTH, ROW = 7.0, 0.42  # inches, of the picture and of a bar


@dataclass(frozen=True)
class Bar:
    """One row: time, memory or energy as shares of the baseline's.

    share:     after this step;  before: of the row above
    text:      gain with its interval
    undecided: the measurement does not tell whether it gains
    """

    label: str
    share: float
    before: float
    text: str
    undecided: bool = False

    @property
    def saved(self) -> float:
        return 0.0 if self.undecided else max(self.before - self.share, 0.0)

    @property
    def added(self) -> float:
        return 0.0 if self.undecided else max(self.share - self.before, 0.0)

    @property
    def solid(self) -> float:
        """The part that both rows have."""
        return min(self.share, self.before)

    @property
    def open(self) -> float:
        """An estimate that may be none."""
        return abs(self.share - self.before) if self.undecided else 0.0


@dataclass(frozen=True)
class Step:
    """ratio: the figure before over that after; None where it is not known;  text: the same with its interval"""

    label: str
    ratio: float | None
    text: str
    undecided: bool = False


def waterfall(result: Result) -> list[Bar]:
    """Rows of the picture; none where no step has a gain."""
    steps = _steps(result)
    if not steps or any(step.ratio is None for step in steps):
        return []  # a later step would stand on an unknown one
    bars, share = [Bar(_baseline(result), 1.0, 1.0, _figure(result))], 1.0
    for step in steps:
        ratio_of_it = step.ratio or 1.0
        bars.append(Bar(step.label, share / ratio_of_it, share, step.text, step.undecided))
        share /= ratio_of_it
    anew = _anew(result)
    return [*bars, anew] if anew else bars


def quantity(result: Result) -> str:
    """The quantity that the bars show."""
    objective = result.search.objective if result.search else "time"
    return {"memory": "peak memory", "energy": "energy of a step"}.get(objective, "time of a step")


def _steps(result: Result) -> list[Step]:
    if result.ablation is not None:
        members = result.ablation.cumulative
        return [
            Step(f"+ {e.member}", e.gain.estimate if e.gain else None, said(e.gain), holds_one(e.gain)) for e in members
        ]
    if result.search is None:
        return []
    trials = kept(result.trials)
    if result.search.objective == "time":
        return [Step(f"+ {t.change}", t.gain.estimate if t.gain else None, said(t.gain)) for t in trials]
    show, name = FIGURES[result.search.objective]
    pairs = [(t, getattr(t.baseline, name), getattr(t.candidate, name)) for t in trials]
    return [
        Step(f"+ {t.change}", before / after if before and after else None, f"{show(before)} → {show(after)}")
        for t, before, after in pairs
        if before is not None and after is not None
    ]


def _anew(result: Result) -> Bar | None:
    """The winner's last measurement, beside the baseline."""
    if result.search is None or result.speedup is None:
        return None
    label = f"{result.label}, measured anew"
    if result.search.objective == "time":
        found, undecided = result.speedup, result.verdict is Verdict.INCONCLUSIVE
        text = f"{'undecided: ' if undecided else ''}{said(Gain(found.estimate, found.low, found.high))}"
        return Bar(label, 1 / found.estimate, 1.0, text, undecided)
    show, name = FIGURES[result.search.objective]
    before, after = getattr(result.baseline, name), getattr(result.candidate, name)
    return Bar(label, after / before, 1.0, f"{show(before)} → {show(after)}") if before and after else None


def holds_one(gain: Gain | None) -> bool:
    """Whether the interval allows a gain and a loss."""
    return gain is not None and gain.low < 1 < (gain.high or float("inf"))


def said(gain: Gain | None) -> str:
    """1.31× (1.28 to 1.34)."""
    if gain is None:
        return ""
    high = inf if gain.high is None or gain.high > 1e4 else gain.high
    return f"{ratio(gain.estimate)} ({low_to_high(gain.low, high)})"


def _baseline(result: Result) -> str:
    return str(result.config.get("baseline") or "baseline")


def _figure(result: Result) -> str:
    """The baseline's."""
    objective = result.search.objective if result.search else "time"
    if objective == "time":
        return f"{microseconds(result.baseline.step_us)} a step" if result.baseline.step_us else ""
    show, name = FIGURES[objective]
    value = getattr(result.baseline, name)
    return show(value) if value is not None else ""


def largest(bars: Iterable[Bar]) -> float:
    """Of all shares, so that bars fit."""
    return max(max(bar.share, bar.before) for bar in bars)


def draw(result: Result, folder: Path) -> bool:
    """Write the picture into a job's folder; False where there is nothing to show."""
    bars = waterfall(result)
    if not bars:
        return False
    from matplotlib.figure import Figure  # without pyplot: no backend, no global state; takes a second to import

    figure = Figure(figsize=(WIDTH, ROW * len(bars) + 0.9), layout="constrained")
    axes = figure.subplots()
    places = range(len(bars))
    solid = [100 * bar.solid for bar in bars]
    axes.barh(places, solid, color="#4c78a8")
    axes.barh(places, [100 * bar.saved for bar in bars], left=solid, color="#c6dbc9")
    axes.barh(places, [100 * bar.added for bar in bars], left=solid, color="#e45756")
    for place, bar in zip(places, bars, strict=True):
        if bar.open:
            axes.barh(place, 100 * bar.open, left=100 * bar.solid, color="#d9d9d9", hatch="///", edgecolor="#8a8f98")
    end = 100 * largest(bars)
    for place, bar in zip(places, bars, strict=True):
        axes.text(1.01 * end, place, bar.text, va="center", fontsize=8)
    axes.set_yticks(list(places), [bar.label for bar in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.6 * end)
    axes.set_xlabel(f"{quantity(result)}, % of the baseline's")
    axes.spines[["top", "right"]].set_visible(False)
    path = folder / filenames.WATERFALL
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True
