"""Sections of a report about jobs that make several comparisons."""

from __future__ import annotations

from dataclasses import dataclass

from optexp.records.trials import Search, Trial
from optexp.reporting import trial_tables, waterfall
from optexp.result import Result
from optexp.support.units import percent


@dataclass(frozen=True)
class Drawn:
    """A row of a waterfall: its parts in percent of the room that bars have."""

    label: str
    text: str
    share: float
    solid: float
    saved: float
    added: float
    open: float


def drawn(result: Result) -> list[Drawn]:
    """The waterfall of a result."""
    bars = waterfall.waterfall(result)
    whole = 100 / waterfall.largest(bars) if bars else 0.0
    parts = ([whole * part for part in (b.solid, b.saved, b.added, b.open)] for b in bars)
    return [Drawn(bar.label, bar.text, bar.share, *part) for bar, part in zip(bars, parts, strict=True)]


@dataclass(frozen=True)
class SearchSection:
    """A search, its waterfall, and what that shows."""

    found: Search
    bars: list[Drawn]
    quantity: str


def search(result: Result) -> SearchSection | None:
    """The decision of mode=auto, its waterfall, and what was not tried."""
    found = result.search
    return SearchSection(found, drawn(result), waterfall.quantity(result)) if found else None


@dataclass(frozen=True)
class AblationSection:
    """Counts.

    rows:  by member, a cell for each way to count
    facts: in words
    """

    bars: list[Drawn]
    rows: list[tuple[str, list[str]]]
    facts: list[tuple[str, str]]
    confidence: str


def ablation(result: Result) -> AblationSection | None:
    """The share of each member of a stack."""
    found = result.ablation
    if found is None:
        return None
    shapley = {entry.member: entry for entry in found.shapley}
    counted = zip(found.cumulative, found.leave_one_out, strict=True)
    rows = [(a.member, [*map(trial_tables.cell, (a, b, shapley.get(a.member)))]) for a, b in counted]
    confidence = percent(float(result.config.get("measurement.confidence", 0.99)))
    return AblationSection(drawn(result), rows, trial_tables.interactions(found), confidence)


@dataclass(frozen=True)
class TrialsSection:
    """Trials.

    rows:     each with its gain, and what to know beside it, in words
    searched: a search made them
    """

    rows: list[tuple[Trial, str, list[str]]]
    searched: bool


def trials(result: Result) -> TrialsSection | None:
    """Comparisons of a job that makes several."""
    searched = result.search is not None
    reasons = zip(result.trials, trial_tables.reasons(result.trials), strict=True)
    rows = [(t, waterfall.said(t.gain), followed(t) if searched else [text] * bool(text)) for t, text in reasons]
    return TrialsSection(rows, searched) if rows else None


def followed(trial: Trial) -> list[str]:
    """Why a search made a trial, against what, and what followed."""
    against = f"compared with {'+'.join(trial.against)}" if trial.against else ""
    return [", ".join(filter(None, (trial.why, against))), trial.outcome]
