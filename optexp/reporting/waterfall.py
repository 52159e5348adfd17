"""The waterfall of a search or an ablation: what is left of the baseline's step after each step, as bars."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from optexp.records.trials import Gain, kept
from optexp.reporting import summary
from optexp.result import Result
from optexp.support.units import ratio

FILE = "plots/waterfall.png"
WIDTH, ROW = 7.0, 0.42  # inches, of the picture and of a bar


@dataclass(frozen=True)
class Bar:
    """One row: the step's time as shares of the baseline's.

    share:  after this step;  before: of the row above
    text:   gain with its interval
    """

    label: str
    share: float
    before: float
    text: str

    @property
    def saved(self) -> float:
        return max(self.before - self.share, 0.0)

    @property
    def added(self) -> float:
        return max(self.share - self.before, 0.0)


def waterfall(result: Result) -> list[Bar]:
    """Rows of the picture; none where no step has a gain."""
    steps: list[tuple[str, Gain | None]]
    if result.ablation is not None:
        steps = [(f"+ {entry.member}", entry.gain) for entry in result.ablation.cumulative]
    elif result.search is not None:
        steps = [(f"+ {trial.change}", trial.gain) for trial in kept(result.trials)]
    else:
        return []
    bars, share = [Bar(_baseline(result), 1.0, 1.0, _time(result))], 1.0
    for label, gain in steps:
        if gain is None:
            return []  # a later step would stand on an unknown one
        bars.append(Bar(label, share / gain.estimate, share, said(gain)))
        share /= gain.estimate
    if result.search is not None and result.speedup is not None:
        found = result.speedup
        whole = Gain(found.estimate, found.low, found.high)
        bars.append(Bar(f"{result.label}, measured anew", 1 / found.estimate, 1.0, said(whole)))
    return bars if len(bars) > 1 else []


def said(gain: Gain | None) -> str:
    """1.31× (1.28 to 1.34)."""
    if gain is None:
        return ""
    high = "∞" if gain.high is None or gain.high > 1e4 else f"{gain.high:.3g}"
    return f"{ratio(gain.estimate)} ({gain.low:.3g} to {high})"


def _baseline(result: Result) -> str:
    return str(result.config.get("baseline") or "baseline")


def _time(result: Result) -> str:
    return f"{summary.microseconds(result.baseline.step_us)} a step" if result.baseline.step_us else ""


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
    axes.barh(places, [100 * bar.share for bar in bars], color="#4c78a8")
    axes.barh(places, [100 * bar.saved for bar in bars], left=[100 * bar.share for bar in bars], color="#c6dbc9")
    axes.barh(places, [100 * bar.added for bar in bars], left=[100 * bar.before for bar in bars], color="#e45756")
    end = 100 * largest(bars)
    for place, bar in zip(places, bars, strict=True):
        axes.text(1.01 * end, place, bar.text, va="center", fontsize=8)
    axes.set_yticks(list(places), [bar.label for bar in bars], fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.45 * end)
    axes.set_xlabel("time of a step, % of the baseline's")
    axes.spines[["top", "right"]].set_visible(False)
    path = folder / FILE
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    return True
