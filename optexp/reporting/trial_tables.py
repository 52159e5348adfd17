"""Tables of an ablation or a search, for the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from optexp.records.trials import Ablation, Contribution, Search, Trial, Untried
from optexp.reporting.tables import ALARM, COLOURS, frameless, labelled
from optexp.reporting.waterfall import said
from optexp.result import Result
from optexp.support.units import ratio

UNSUPPORTED = "UNSUPPORTED"
SHOWN = 3  # first looks


def tables(result: Result) -> Iterator[RenderableType]:
    """Tables below the comparison itself; none for a job of one comparison."""
    if result.ablation is not None:
        yield members(result.ablation)
        yield labelled(interactions(result.ablation))
        yield trials(result.trials, searched=False)
    elif result.search is not None:
        yield trials(result.trials, searched=True)
        yield labelled([*first_looks(result.search), ("ended", result.search.ended), *left_out(result.search)])


def members(found: Ablation) -> Table:
    """A row for each member, a column for each way to count."""
    table = frameless("member", "added in turn", "beside the rest", "Shapley")
    shapley = {entry.member: entry for entry in found.shapley}
    for turn, last in zip(found.cumulative, found.leave_one_out, strict=True):
        cells = (turn.member, cell(turn), cell(last), cell(shapley.get(turn.member)))
        table.add_row(*map(Text, cells))
    return table


def cell(entry: Contribution | None) -> str:
    """A gain with its interval, or a dash."""
    return said(entry.gain) if entry and entry.gain else "–"


def interactions(found: Ablation) -> list[tuple[str, str]]:
    """In words, and why a count is missing."""
    rows = [("" if index else "together", text) for index, text in enumerate(found.interactions)]
    missing = [("Shapley", f"none: {found.no_shapley}")] if found.no_shapley else []
    every = (entry.reason for entry in (*found.cumulative, *found.leave_one_out) if entry.reason)
    unknown = dict.fromkeys(part for reason in every for part in reason.split("; "))
    return [*rows, *missing, *([("not known", "; ".join(unknown))] if unknown else [])]


def reasons(found: Sequence[Trial]) -> list[str]:
    """Of each trial without a speedup; one that was said before is told by the number of that trial."""
    first, said = dict[str, int](), list[str]()
    for trial in found:
        known = first.setdefault(trial.reason, trial.number)
        said.append(trial.reason if not trial.reason or known == trial.number else f"as trial {known}")
    return said


def trials(found: Sequence[Trial], searched: bool) -> Table:
    """A row for each trial.

    Args:
        searched: They were made by a search, which has said what followed from each.
    """
    names = ["trial>", "change" if searched else "stack", "verdict", "gain", *(["predicted>"] if searched else [])]
    table = frameless(*names, "outcome" if searched else "note")
    for trial, reason in zip(found, reasons(found), strict=True):
        row = [str(trial.number), trial.change if searched else trial.label]
        verdict = Text(trial.verdict, style=COLOURS.get(trial.verdict, ALARM), no_wrap=True)
        predicted = [f"≤ {ratio(trial.predicted)}" if trial.predicted else "–"] if searched else []
        outcome = trial.outcome if searched else reason
        table.add_row(*map(Text, row), verdict, Text(said(trial.gain)), *predicted, Text(outcome, style="dim"))
    return table


def first_looks(found: Search) -> list[tuple[str, str]]:
    """The best of them."""
    looks = sorted(((look.speedup, look.change) for look in found.looks if look.speedup), reverse=True)[:SHOWN]
    best = ", ".join(f"{change} {ratio(speedup)}" for speedup, change in looks)
    return [("first looks", f"{len(found.looks)}, which verify nothing; the best: {best}")] if looks else []


def left_out(found: Search) -> list[tuple[str, str]]:
    """Changes that were not tried, by reason; those that this device or program refuses by name alone."""
    grouped = defaultdict[str, list[Untried]](list)
    for entry in found.untried:
        grouped[UNSUPPORTED if entry.reason.startswith(UNSUPPORTED) else entry.reason].append(entry)
    rows = list[tuple[str, str]]()
    for reason, entries in grouped.items():
        names = ", ".join(entry.change for entry in entries)
        if reason == UNSUPPORTED:
            changes = [entry.change for entry in entries]  # a strategy that is refused as it is stands for its variants
            names = ", ".join(c for c in changes if c.partition("[")[0] == c or c.partition("[")[0] not in changes)
            reason = "UNSUPPORTED here (the report has each reason)"
        rows.append(("" if rows else "not tried", f"{names}: {reason}"))
    return rows
