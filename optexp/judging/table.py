"""The summary in the terminal: a row for each candidate, counts of verdicts, fast_p. Needs no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from optexp.judging.fast_p import FastP, fast_p
from optexp.judging.line import Line
from optexp.reporting.tables import ALARM, COLOURS
from optexp.support.units import percent, ratio

STATUSES = (1, 3, 4)  # the worst first


def show(lines: Sequence[Line], console: Console) -> None:
    """Print everything."""
    console.print(rows(lines))
    console.print(counted(lines), highlight=False)
    for found in fast_p(lines):
        console.print(sentence(found), highlight=False)


def rows(lines: Iterable[Line]) -> Table:
    """A row for each line."""
    table = Table(box=None, pad_edge=False)
    for name in ("problem", "verdict", "speedup", "interval", "× bound", "why"):
        table.add_column(name, justify="right" if name in ("speedup", "interval", "× bound") else "left")
    table.columns[0].overflow = "fold"
    for line in lines:
        speedup = line.speedup
        estimate = ratio(speedup.estimate) if speedup else ""
        ends = f"{speedup.low:.3g} to {'∞' if speedup.high is None else f'{speedup.high:.3g}'}" if speedup else ""
        bound = f"{line.bound.ratio:.3g}" if line.bound.ratio else ""
        colour = COLOURS.get(line.verdict, ALARM)
        table.add_row(line.title, f"[{colour}]{line.verdict}[/]", estimate, ends, bound, why(line))
    return table


def why(line: Line) -> str:
    """The verdict's reason; empty for a verdict with a speedup and for VERIFIED, which need none."""
    from rich.markup import escape

    return "" if line.speedup or line.verdict == "VERIFIED" else escape(line.reason)


def counted(lines: Iterable[Line]) -> str:
    """The number of lines with each verdict, in words."""
    counts = Counter(line.verdict.value for line in lines)
    return ", ".join(f"{verdict} {count}" for verdict, count in counts.most_common())


def sentence(found: FastP) -> str:
    """fast_p in words."""
    entrant = f"{found.entrant}: " if found.entrant else ""
    measured = ""
    if (found.sure, found.perhaps) != (found.solved, found.solved):
        measured = f"; {found.sure} to {found.perhaps} by the intervals and what is undecided"
    return (
        f"{entrant}fast_{found.p:g} = {found.share:.3g}, {found.solved} of {found.problems} problems{measured};"
        f" {percent(found.confidence)} interval over such problems {found.low:.2g} to {found.high:.2g}"
    )


def status(lines: Iterable[Line]) -> int:
    """The exit status of the worst line, in the order of `STATUSES`; 0 where every candidate is right."""
    statuses = {line.verdict.exit_status for line in lines}
    return next((code for code in STATUSES if code in statuses), 0)
