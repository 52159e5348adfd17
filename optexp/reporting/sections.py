"""Sections of a report, in their order. Each is a function here and a template of its name in `templates/sections/`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from omegaconf import OmegaConf

from optexp.reporting import plots, summary, timeline
from optexp.reporting.wording import GATES
from optexp.result import Result, Verdict

Variables = dict[str, Any]  # variables of a template, beside `result` and `summary`


@dataclass(frozen=True)
class Page:
    """What a report is of.

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


Section = Callable[[Page], Variables | None]  # None leaves it out
SECTIONS: dict[str, Section] = {}


def section(function: Section) -> Section:
    """Make a section known by the function's name."""
    SECTIONS[function.__name__] = function
    return function


@section
def what_now(page: Page) -> Variables | None:
    text = summary.what_now(page.result)
    return {"what_now": text} if text else None


@section
def error(page: Page) -> Variables | None:
    return {} if page.result.error else None


@section
def figures(page: Page) -> Variables | None:
    rows = summary.rows(page.result, details=True) if page.has_figures else []
    return {"rows": rows} if rows else None


@section
def why(page: Page) -> Variables | None:
    return {} if page.result.explanation and page.measured else None


@section
def try_next(page: Page) -> Variables | None:
    return {} if figures(page) and summary.suggestion(page.result) else None


@section
def certainty(page: Page) -> Variables | None:
    """Every pair, the speedup's interval, and the blocks' times."""
    strip = plots.strip(page.result) if page.measured else None
    if strip is None:
        return None
    return {"strip": strip, "histograms": timeline.histograms(page.result), **meanwhile(page)}


@section
def card(page: Page) -> Variables | None:
    """Readings of the card, where no section shows times beside them."""
    found = meanwhile(page)
    return found if found["panels"] and certainty(page) is None else None


def meanwhile(page: Page) -> Variables:
    """Panels over the time of measuring, without the blocks' times where those are withheld."""
    return {"panels": timeline.panels(page.result), "axis": timeline.axis(page.result)}


SHOWN_APART = {
    "gates", "worst", "weakest", "headline", "ok", "failures", "tensors", "mutants", "visible", "distribution",
    "trajectory",
}  # fmt: skip


@section
def equivalence(page: Page) -> Variables | None:
    """Gates, tensors, the distribution of errors, and all other checks."""
    found = page.result.equivalence
    if found is None:
        return None
    return {
        "gates": GATES,
        "checks": {k: v for k, v in asdict(found).items() if k not in SHOWN_APART and v is not None},
        "worst": asdict(found.worst) if found.worst else None,
        "errors": plots.errors(page.result),
    }


@section
def evidence(page: Page) -> Variables | None:
    return {} if page.result.evidence else None


@section
def breakdown(page: Page) -> Variables | None:
    """Terms of a step, kernels, operators and bottlenecks, by arm."""
    arms = page.result.profile.arms()
    parts = {name: dict(summary.parts(profile.metrics)) for name, profile in arms.items()}
    terms = list(dict.fromkeys(name for shares in parts.values() for name in shares))
    shown = {arm: shares for arm, shares in parts.items() if shares}
    return {"arms": arms, "breakdowns": shown, "terms": terms} if arms else None


@section
def measuring(page: Page) -> Variables | None:
    """Watchdogs, controls and notes."""
    return {} if summary.watches(page.result) or page.result.notes or page.result.placement else None


@section
def same_again(page: Page) -> Variables | None:
    return {"command": page.command} if page.command else None


@section
def time_to_verdict(page: Page) -> Variables | None:
    seconds = {k: v for k, v in page.result.seconds.items() if k != "total"}
    total = max(page.result.seconds.get("total", 0.0), sum(seconds.values()))
    return {"seconds": seconds, "total": total} if seconds and total else None


@section
def environment(page: Page) -> Variables | None:
    return {} if page.result.environment else None


@section
def configuration(page: Page) -> Variables | None:
    config = page.result.config
    return {"config": OmegaConf.to_yaml(OmegaConf.create(config))} if config else None
