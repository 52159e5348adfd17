"""Sections of a report, in their order.

Each is a function here and a template of its name in `templates/sections/`, whose only variable is `section`: the
object that the function returns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TypeVar

from omegaconf import OmegaConf

from optexp.records.difference import Change
from optexp.records.measurement import Control, Measurement, Watch
from optexp.records.memory import MemoryProfile
from optexp.records.nsight import ToolRun
from optexp.records.prediction import Prediction
from optexp.records.profile import ArmProfile, Bottleneck, Check
from optexp.records.ranges import Ranges, TraceFile
from optexp.records.verification import Verification
from optexp.reporting import memory_plot, plots, roofline_picture, summary, timeline, trial_sections
from optexp.reporting.compiler_section import CompilerSection, compiler_section
from optexp.reporting.memory_plot import Areas, CompositionRow
from optexp.reporting.plots import Errors, Strip
from optexp.reporting.roofline_picture import Shown
from optexp.reporting.summary import Row
from optexp.reporting.timeline import Histogram, Panel, Tick
from optexp.reporting.trial_sections import AblationSection, SearchSection, TrialsSection
from optexp.reporting.wording import GATES, rechecked, yardstick
from optexp.result import Engagement, Problem, Result, Verdict

S = TypeVar("S", bound="Callable[[Page], object | None]")


@dataclass(frozen=True)
class Page:
    """The subject of a report.

    command: that repeats the comparison; empty if unknown
    """

    result: Result
    command: str

    @property
    def measured(self) -> bool:
        return self.result.verdict.measured

    @property
    def has_figures(self) -> bool:
        return self.measured or self.result.verdict is Verdict.PROFILED


SECTIONS: dict[str, Callable[[Page], object | None]] = {}  # None leaves a section out


def section(function: S) -> S:
    """Make a section known by the function's name."""
    SECTIONS[function.__name__] = function
    return function


@section
def regression(page: Page) -> str | None:
    return summary.regression(page.result) or None


@section
def error(page: Page) -> Problem | None:
    return page.result.error


@dataclass(frozen=True)
class Figures:
    """compared: both arms were measured; else the rows are the baseline's"""

    rows: list[Row]
    compared: bool
    cost: str


@section
def figures(page: Page) -> Figures | None:
    rows, cost = summary.rows(page.result, details=True) if page.has_figures else [], summary.cost(page.result)
    shown = [row for row in rows if not (cost and row.name == "set-up")]  # which the line of the cost says, too
    compared = page.measured and any(row.candidate for row in shown)  # a search that kept nothing has the baseline's
    return Figures(shown, compared, cost) if rows else None


@section
def search(page: Page) -> SearchSection | None:
    """The decision of mode=auto, its waterfall, and what was not tried."""
    return trial_sections.search(page.result)


@section
def ablation(page: Page) -> AblationSection | None:
    """The share of each member of a stack."""
    return trial_sections.ablation(page.result)


@section
def trials(page: Page) -> TrialsSection | None:
    """Comparisons of a job that makes several."""
    return trial_sections.trials(page.result)


@dataclass(frozen=True)
class Why:
    """changes: operators whose time changed; none where times are withheld"""

    sentences: list[str]
    changes: list[Change]


@section
def why(page: Page) -> Why | None:
    """Causes in words, of time and of memory, and the operators whose time changed."""
    sentences = [*page.result.explanation, *summary.memory_reasons(page.result)]
    if not page.measured or not sentences:
        return None
    difference = page.result.profile.difference
    return Why(sentences, difference.changes if difference else [])


@dataclass(frozen=True)
class Predicted:
    """rows: of a program that was profiled alone;  tested: the candidate's, beside what was measured"""

    rows: list[Prediction]
    tested: str


@section
def predicted(page: Page) -> Predicted | None:
    """The most that strategies can gain, by their own bounds."""
    rows, tested = page.result.profile.predictions, summary.prediction(page.result)
    return Predicted(rows, tested) if page.has_figures and (rows or tested) else None


@dataclass(frozen=True)
class Meanwhile:
    """Panels over the time of measuring, with one axis below them."""

    panels: list[Panel]
    axis: list[Tick]


@dataclass(frozen=True)
class Certainty:
    """Every pair of blocks, and the speedup's interval.

    confidence: of the interval
    spread:     expected between processes, in words, where one was measured; else empty
    """

    confidence: float
    strip: Strip
    histograms: list[Histogram]
    meanwhile: Meanwhile
    spread: str = ""


@section
def certainty(page: Page) -> Certainty | None:
    """Every pair, the speedup's interval, and the blocks' times."""
    result = page.result
    strip = plots.strip(result) if page.measured else None
    if strip is None or result.speedup is None:
        return None
    spread = result.measurement.spread if result.measurement else None
    allowed = f"{100 * spread.deviation:.2g} % ({spread.source})" if spread else ""
    return Certainty(result.speedup.confidence, strip, timeline.histograms(result), meanwhile(page), allowed)


@section
def card(page: Page) -> Meanwhile | None:
    """Readings of the card, where no section shows times beside them."""
    found = meanwhile(page)
    return found if found.panels and certainty(page) is None else None


def meanwhile(page: Page) -> Meanwhile:
    """Panels over the time of measuring, without the blocks' times where those are withheld."""
    return Meanwhile(timeline.panels(page.result), timeline.axis(page.result))


SHOWN_APART = {
    "gates", "worst", "weakest", "headline", "ok", "failures", "tensors", "mutants", "visible", "distribution",
    "trajectory", "recheck",
}  # fmt: skip


@dataclass(frozen=True)
class Equivalence:
    """A verification, and what is said of it.

    gates:  what each gate asks, by name
    yardstick: whose values stand beside the candidate's
    checks: what else was checked, by name
    worst:  fields of the worst finding
    replay: key by which the same inputs are met again; empty if unknown
    """

    found: Verification
    verified: str
    gates: Mapping[str, str]
    checks: Mapping[str, object]
    worst: Mapping[str, object] | None
    errors: Errors | None
    replay: str
    yardstick: str


@section
def equivalence(page: Page) -> Equivalence | None:
    """Gates, tensors, the distribution of errors, and all other checks."""
    result, found = page.result, page.result.equivalence
    if found is None:
        return None
    return Equivalence(
        found,
        verified=summary.verified(result),
        gates=GATES,
        checks={k: v for k, v in asdict(found).items() if k not in SHOWN_APART and v is not None}
        | {"after timing": rechecked(found.recheck)},
        worst=asdict(found.worst) if found.worst else None,
        errors=plots.errors(result),
        replay=result.draws.key if result.draws else "",
        yardstick=yardstick(found.contract),
    )


@section
def evidence(page: Page) -> list[Engagement] | None:
    return page.result.evidence or None


@dataclass(frozen=True)
class Breakdown:
    """shares: of a step, by arm and term;  terms: of both arms, in their order"""

    arms: Mapping[str, ArmProfile]
    shares: Mapping[str, Mapping[str, float]]
    terms: list[str]
    bottlenecks: list[Bottleneck]


@section
def breakdown(page: Page) -> Breakdown | None:
    """Terms of a step, kernels, operators and bottlenecks, by arm."""
    arms = page.result.profile.arms()
    parts = {name: dict(summary.parts(profile.metrics)) for name, profile in arms.items()}
    terms = list(dict.fromkeys(name for shares in parts.values() for name in shares))
    shown = {arm: shares for arm, shares in parts.items() if shares}
    return Breakdown(arms, shown, terms, list(page.result.profile.bottlenecks)) if arms else None


@section
def roofline(page: Page) -> Shown | None:
    """The physical bound, the roofline, and the work of each operator."""
    return roofline_picture.shown(page.result)


@section
def checklist(page: Page) -> list[tuple[str, list[Check]]] | None:
    """Checks by level."""
    checks = page.result.profile.checklist
    levels = dict.fromkeys(check.level for check in checks)
    return [(level, [check for check in checks if check.level == level]) for level in levels] or None


@dataclass(frozen=True)
class Operators:
    """arms: those whose operators were traced;  on_device: by arm, whether they launched anything"""

    arms: Mapping[str, ArmProfile]
    on_device: Mapping[str, bool]


@section
def operators(page: Page) -> Operators | None:
    """Operators, modules and the tree of calls, by arm."""
    arms = {name: found for name, found in page.result.profile.arms().items() if found.operators}
    launched = {name: any(row.device_share for row in found.operators) for name, found in arms.items()}
    return Operators(arms, launched) if arms else None


@section
def compiler(page: Page) -> CompilerSection | None:
    """Compiled graphs, graph breaks, recompilations, and resources of kernels, by arm."""
    return compiler_section(page.result)


@dataclass(frozen=True)
class Parts:
    """arms: those with phases, regions, lines or several recordings;  on_device: by arm, whether it used a GPU"""

    arms: Mapping[str, Ranges]
    on_device: Mapping[str, bool]


@section
def parts(page: Page) -> Parts | None:
    """Phases of the step, regions, lines of code, and recordings, by arm."""
    found = {name: profile.ranges for name, profile in page.result.profile.arms().items() if profile.ranges}
    shown = {name: r for name, r in found.items() if r.phases or r.regions or r.lines or r.cycles}
    launched = {name: any(row.kernels for row in (*r.phases, *r.regions)) for name, r in shown.items()}
    used = {name: launched[name] or any(row.device_share for row in r.lines) for name, r in shown.items()}
    return Parts(shown, used) if shown else None


@section
def nsight(page: Page) -> ToolRun | None:
    return page.result.profile.tool


@section
def trace_files(page: Page) -> list[tuple[str, list[TraceFile]]] | None:
    """Files of profiles, by arm."""
    arms = page.result.profile.arms().items()
    return [(name, profile.ranges.files) for name, profile in arms if profile.ranges and profile.ranges.files] or None


@dataclass(frozen=True)
class Memory:
    """arms: whose memory was recorded;  plots: their timelines;  composition: of their peaks"""

    arms: Mapping[str, MemoryProfile]
    plots: Mapping[str, Areas]
    composition: list[CompositionRow]


@section
def memory(page: Page) -> Memory | None:
    """Memory by category over steps and at the peak, by arm."""
    arms = {name: found.memory for name, found in page.result.profile.arms().items() if found.memory}
    highest = max((found.peak_bytes for found in arms.values()), default=0)
    drawn = {name: memory_plot.areas(found, highest) for name, found in arms.items()}
    return Memory(arms, drawn, memory_plot.composition(arms)) if arms else None


@dataclass(frozen=True)
class Measuring:
    """measurement: None where none is shown"""

    watches: list[Watch]
    controls: Mapping[str, Control]
    measurement: Measurement | None
    placement: str
    notes: list[str]


@section
def measuring(page: Page) -> Measuring | None:
    """Watchdogs, controls and notes."""
    result, watches = page.result, summary.watches(page.result)
    if not (watches or result.notes or result.placement):
        return None
    placement = summary.placement(result) if result.placement else ""
    return Measuring(watches, summary.controls(result), result.measurement, placement, result.notes)


@section
def same_again(page: Page) -> str | None:
    return page.command or None


@dataclass(frozen=True)
class TimeToVerdict:
    """Seconds in all, and of each phase."""

    total: float
    seconds: Mapping[str, float]


@section
def time_to_verdict(page: Page) -> TimeToVerdict | None:
    seconds = {k: v for k, v in page.result.seconds.items() if k != "total"}
    total = max(page.result.seconds.get("total", 0.0), sum(seconds.values()))
    return TimeToVerdict(total, seconds) if seconds and total else None


@section
def environment(page: Page) -> Mapping[str, object] | None:
    return page.result.environment or None


@section
def configuration(page: Page) -> str | None:
    """The configuration as YAML."""
    config = page.result.config
    return OmegaConf.to_yaml(OmegaConf.create(config)) if config else None
