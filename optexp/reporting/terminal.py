"""The terminal: progress while a comparison works, then a verdict that is read in five seconds."""

from __future__ import annotations

import io
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from optexp.records import filenames
from optexp.records.profile import ArmProfile
from optexp.reporting import profile_tables, summary, trial_tables
from optexp.reporting.ranking import RankedRow
from optexp.reporting.tables import ALARM, COLOURS, frameless, labelled, spaced
from optexp.result import Result, Verdict
from optexp.support.units import rough

if TYPE_CHECKING:
    from optexp.reporting.tracking import Run

PIPE_WIDTH = 120  # of what is not a terminal: a file, a log
SILENCE_S = 60  # the longest on what is not a terminal, while there is news
TRACEBACK_LINES = 30
REASONS = 3
TOP = 5  # rows of a profile's tables


# --- progress --------------------------------------------------------------------------------------------------


class Progress:
    """One line on stderr that says what happens and how long it may still take.

    On a terminal it moves; elsewhere every phase leaves one plain line, the first time that it is entered, and another
    whenever a minute has passed; the first time that it is known, how long it may take is worth a line, too.
    """

    def __init__(self, total_estimate_s: float | None = None, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.deadline = None if total_estimate_s is None else time.monotonic() + total_estimate_s
        self.name = self.text = ""
        self.seen: set[str] = set()
        self.said_at = 0.0
        self.spinner = Spinner("dots")
        # Four times a second: the thread that draws must not be felt by what is measured.
        self.live = Live(get_renderable=self._line, console=self.console, refresh_per_second=4, transient=True)

    def phase(self, name: str, text: str = "") -> None:
        """A new phase begins; it may have been entered before."""
        self.name, self.text = name, text
        self._say(name not in self.seen)
        self.seen.add(name)

    def update(
        self, text: str, done: int | None = None, total: int | None = None, remaining_s: float | None = None
    ) -> None:
        """News from within the phase: how far it is, and a new estimate of the time to go."""
        self.text = text if done is None else f"{text}, {done} of {total}"
        first = self.deadline is None and remaining_s is not None
        if remaining_s is not None:
            self.deadline = time.monotonic() + remaining_s
        self._say(first)

    def expect(self, remaining_s: float, text: str = "") -> None:
        """A new estimate of the time to go; `text` is said in a line of its own, which stays."""
        self.deadline = time.monotonic() + remaining_s
        if text:
            self.say(text)

    def say(self, text: str) -> None:
        """A line of its own, which stays."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _say(self, new: bool = False) -> None:
        if not self.console.is_terminal and (new or time.monotonic() > self.said_at + SILENCE_S):
            line = ", ".join(filter(None, (self._sentence(), self._to_go())))
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
            self.said_at = time.monotonic()

    def _sentence(self) -> str:
        return f"{self.name}: {self.text}" if self.text else self.name

    def _to_go(self) -> str:
        left = 0.0 if self.deadline is None else self.deadline - time.monotonic()
        return f"about {rough(left)} to go" if left >= 1 else ""

    def stop(self) -> None:
        """Take the line away; what is printed next stands in its place. Harmless when called twice."""
        self.live.stop()

    def __enter__(self) -> Self:
        if self.console.is_terminal:
            self.live.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def _line(self) -> RenderableType:
        line = Text(self._sentence(), no_wrap=True, overflow="ellipsis")
        if left := self._to_go():
            line.append(f"  {left}", style="dim")
        self.spinner.update(text=line)
        return self.spinner


# --- one result ------------------------------------------------------------------------------------------------


Show = Callable[[Result, Path, "Run | None"], None]


def show(result: Result, folder: Path, run: Run | None = None) -> None:
    """Print the verdict; of an UNSUPPORTED one only the reason, and where its record is."""
    console = output()
    for line in opening(result):
        console.print(line, soft_wrap=True)
    refused = result.verdict is Verdict.UNSUPPORTED and not result.trials
    parts = spaced([*([] if refused else body(result)), locations(folder, run)])
    console.print(Padding(Group(*parts), (1, 0, 1, 2), expand=False))


def show_interrupted(result: Result, folder: Path) -> None:
    """The line of a comparison that was ended from outside, in the form of a verdict's."""
    text = Text(f"{result.workload} · {result.label}  ", style="bold")
    text.append("INTERRUPTED", style=ALARM)
    said = result.error.message.removeprefix("interrupted") if result.error else ""
    text.append(f"{said}: the record is {_relative(folder / 'result.json')}", style="not bold")
    output().print(text, soft_wrap=True)


def render(result: Result) -> RenderableType:
    """The verdict without the places where its record is."""
    return Group(*opening(result), Padding(Group(*spaced(body(result))), (1, 0, 0, 2), expand=False))


def output() -> Console:
    """Standard output; what is not a terminal gets lines long enough for its tables, and nothing that is not seen."""
    if sys.stdout.isatty():
        return Console(highlight=False, markup=False)
    return Console(file=Trimmed(), width=PIPE_WIDTH, highlight=False, markup=False)


class Trimmed(io.StringIO):
    """Standard output, without the blanks that fill a table's last column."""

    def write(self, text: str) -> int:
        return sys.stdout.write(re.sub(r" +$", "", text, flags=re.MULTILINE))

    def flush(self) -> None:
        sys.stdout.flush()


def opening(result: Result) -> list[Text]:
    """The first lines: what a search decided, then the verdict that it rests on."""
    decision = [Text(result.search.decision, style="bold")] if result.search is not None else []
    return [*decision, headline(result)]


def headline(result: Result) -> Text:
    """The runner's own sentence, with the verdict in colour and the job it belongs to."""
    text = Text(f"{result.workload} · {result.label}  ", style="bold")
    start = len(text)
    text.append(result.headline, style="not bold")
    if result.headline.startswith(result.verdict):
        text.stylize(colour(result.verdict), start, start + len(result.verdict))
    return text


def body(result: Result) -> list[RenderableType]:
    """Lines below the headline, by the kind of verdict."""
    if result.verdict is Verdict.PROFILED:
        return list(_profile(result))
    if result.verdict is Verdict.ERROR:
        return [*_error(result), *trial_tables.tables(result)]
    if result.verdict.measured and result.search is not None and not result.search.compared:
        return [alone(result), *trial_tables.tables(result), labelled(_remarks(result))]
    if result.verdict.measured:
        return [comparison(result), labelled(_facts(result)), *trial_tables.tables(result)]
    verified = summary.verified(result) if result.equivalence and result.equivalence.ok else ""
    engaged = "; ".join(summary.evidence(result)) if result.verdict is Verdict.VERIFIED else ""  # else the headline's
    first = [("verified", verified), ("evidence", engaged)]
    facts = labelled([*first, *_remarks(result), ("now", summary.what_now(result))])
    return [facts, *trial_tables.tables(result)]


def comparison(result: Result) -> Table:
    """Baseline and candidate side by side."""
    table = frameless("", "baseline>", "candidate>", "change>")
    for row in summary.rows(result):
        table.add_row(row.name, row.baseline, row.candidate, row.change)
    return table


def locations(folder: Path, run: Run | None) -> Table:
    """Where the record is."""
    kinds = (
        ("report", filenames.REPORT),
        ("study", filenames.STUDY_PAGE),
        ("ranking", filenames.RANKING),
        ("record", filenames.RESULT),
    )
    record = next(((kind, _relative(folder / name)) for kind, name in kinds if (folder / name).exists()), ("", ""))
    return labelled([record, ("MLflow", run.where if run else "")])


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    yield "regression", summary.regression(result)
    yield "verified", summary.verified(result)
    yield "evidence", "; ".join(summary.evidence(result))
    if result.verdict is not Verdict.INCONCLUSIVE:  # reasons of a difference that may be none
        for index, sentence in enumerate(result.explanation[:REASONS]):
            yield ("" if index else "why"), sentence
        yield "predicted", summary.prediction(result)
    yield "measured", summary.measured(result)
    yield "bound", summary.unbound(result)
    yield "one step", summary.single(result)
    yield "memory", "; ".join([*summary.memory_reasons(result)[:1], *filter(None, [summary.memory(result)])])
    yield "cost", summary.cost(result)
    yield from _remarks(result)
    yield "try next", summary.suggestion(result)


def _remarks(result: Result) -> Iterator[tuple[str, str]]:
    """Remarks that the headline does not make."""
    for remark in summary.remarks(result):
        if (remark.partition(": ")[2] or remark) not in result.headline:
            yield "note", remark


def _error(result: Result) -> Iterator[RenderableType]:
    tail = (result.error.traceback if result.error else "").strip().splitlines()[-TRACEBACK_LINES:]
    if tail:
        yield Text("\n".join(tail), style="dim")
    yield labelled(_remarks(result))


def _profile(result: Result) -> Iterator[RenderableType]:
    facts = result.profile.baseline or ArmProfile()
    yield alone(result)
    yield from profile_tables.of_arm(facts, TOP)
    yield profile_tables.bottlenecks(result.profile.bottlenecks)
    yield profile_tables.predictions(result.profile.predictions)
    yield labelled([*summary.physical_facts(result), *_remarks(result), ("try next", summary.suggestion(result))])


def alone(result: Result) -> Table:
    """The baseline's figures where there is nothing to compare."""
    table = frameless("", "baseline>")
    for row in summary.rows(result):
        table.add_row(row.name, row.baseline)
    return table


# --- a sweep ---------------------------------------------------------------------------------------------------


def sweep_table(rows: Sequence[RankedRow]) -> RenderableType:
    """One line for each job, in the order given, and what to know beside it under its number.

    What was only profiled says at once where its time goes: that is all there is to know.
    """
    names = ["verdict", "at least>", "estimate>", "time/step>", "peak memory>", "workload", "strategy", "note"]
    profiled = all(row.verdict is Verdict.PROFILED for row in rows)
    left_out = {"at least>", "estimate>", "strategy"} if profiled else set()
    table = frameless(*(name for name in names if name not in left_out))
    numbers: dict[str, str] = {}  # of the notes, which many jobs may share
    for row in rows:
        number = numbers.setdefault(row.note, str(len(numbers) + 1)) if row.note else ""
        cells: list[Text | str] = [
            Text(row.verdict, style=colour(row.verdict), no_wrap=True),
            row.at_least,
            row.estimate,
            row.time,
            row.memory,
            Text(row.title),
            Text(row.strategy),  # brackets are no markup
            Text(row.note if profiled else number, style="dim"),
        ]
        table.add_row(*(cell for name, cell in zip(names, cells, strict=True) if name not in left_out))
    for column in table.columns:
        column.no_wrap = column.header not in ("workload", "strategy", "note")  # what gives way on a narrow screen
    notes = [] if profiled else [(number.rjust(7), text) for text, number in numbers.items()]
    order = [] if profiled else [Text("the surest gain first", style="dim")]
    return Group(*order, *spaced([table, labelled(notes)]))


SENTENCES = ("why", "verdict", "longest kernel", "where a step goes")  # columns of a study's table


def study_table(question: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> RenderableType:
    """The question, and the table that answers it."""
    table = frameless(*headings)
    for row in rows:
        table.add_row(*map(Text, row))
    for column in table.columns:
        column.no_wrap = column.header not in SENTENCES  # which give way: no other word is broken
    return Group(Text(question, style="bold"), Text(), table)


def colour(verdict: Verdict) -> str:
    return COLOURS.get(verdict, ALARM)


def _relative(path: Path) -> str:
    """Shorter where it is below the working folder."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)
