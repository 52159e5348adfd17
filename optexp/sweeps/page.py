"""report.html of a sweep or a study: one page for all jobs, with a link to each, and its table as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, log
from pathlib import Path
from typing import Any

from markupsafe import Markup
from omegaconf import OmegaConf

from optexp.records import filenames
from optexp.reporting import front, markdown, report, summary
from optexp.reporting.ranking import RankedRow
from optexp.reporting.titles import titles
from optexp.result import Result, Verdict
from optexp.support.units import low_to_high
from optexp.sweeps import plot, study_table
from optexp.sweeps.curves import curves
from optexp.sweeps.figures import Point
from optexp.sweeps.heat_map import HeatMap
from optexp.sweeps.study import Study

WIDTH, MARGIN = 300, 8  # of an interval, in pixels
SENTENCE = 40  # letters: a text that is longer needs the whole width
NOTE = "note"
HEADS = [
    "job", "workload", "strategy", "verdict", "at least", "estimate", "at most", "time/step", "peak memory", NOTE,
]  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job of the sweep."""

    folder: Path
    result: Result
    row: RankedRow


@dataclass(frozen=True)
class Bar:
    """A job's line in the ranking.

    interval: left end, right end and estimate in pixels; None where no speedup may be shown
    """

    job: RankedRow
    interval: tuple[float, float, float] | None


@dataclass(frozen=True)
class Table:
    """A table whose sentences stand below their rows.

    rows: cells, then sentences of a row
    """

    heads: list[str]
    rows: list[tuple[list[str], list[str]]]

    @classmethod
    def of(cls, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
        """A column with a sentence leaves the table."""
        wide = [any(len(row[n]) > SENTENCE for row in rows) for n in range(len(heads))]
        named = [
            [(head, text) for head, text, out in zip(heads, row, wide, strict=True) if out and text] for row in rows
        ]
        return cls(
            [head for head, out in zip(heads, wide, strict=True) if not out],
            [
                ([text for text, out in zip(row, wide, strict=True) if not out],
                 [text if head == NOTE else f"{head}: {text}" for head, text in below])
                for row, below in zip(rows, named, strict=True)
            ],
        )  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """A study's part of the page.

    pictures: panels as SVG;  told: the reasons, in lines;  heads, rows: its table;  raw: the same as numbers
    """

    question: str
    pictures: list[Markup]
    told: list[str]
    remarks: list[str]
    heads: list[str]
    rows: list[list[str]]
    raw: tuple[list[str], list[list[Any]]]

    @classmethod
    def of(cls, asked: Study, found: Sequence[Point]) -> Answer:
        """The answer that points give."""
        heads, rows = study_table.table(asked, found)
        return cls(
            question=asked.question,
            pictures=[*map(Markup, plot.as_svg(asked, found))],
            told=plot.tell(asked, found),
            remarks=study_table.remarks(asked, found),
            heads=heads,
            rows=rows,
            raw=study_table.raw(asked, found),
        )


@dataclass(frozen=True)
class Page:
    """to_do: a heading, then sentences with a command or none
    one: place of a ratio of 1 in each interval, in pixels;  curves: panels as SVG, of a sweep over a number"""

    name: str
    claim: str
    basis: str
    tone: str
    checks: list[tuple[bool, str]]
    to_do: tuple[str, list[tuple[str, str]]]
    ranking: list[Bar]
    one: float
    heat: HeatMap | None
    answer: Answer | None
    curves: list[Markup] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)

    @property
    def table(self) -> Table:
        """The jobs, or the answer of a study."""
        shown = self.answer or self
        return Table.of(shown.heads, shown.rows)


def write(name: str, results: Mapping[Path, Result], folder: Path, answer: Answer | None = None) -> None:
    """The page, and its table in two formats, into the sweep's folder.

    Args:
        results: By the jobs' folders.
        answer: Of a study; None for a plain sweep.
    """
    named = zip(results.items(), titles([*results.values()]), strict=True)
    jobs = [Job(path, result, RankedRow.of(result, title, _link(path, folder))) for (path, result), title in named]
    made = page(name, jobs, answer)
    (folder / filenames.REPORT).write_text(report.templates().get_template("sweep.html.j2").render(page=made))
    heads, rows = (answer.heads, answer.rows) if answer else (made.heads, made.rows)
    (folder / filenames.TABLE_MARKDOWN).write_text(markdown.table(heads, rows) + "\n")
    (folder / filenames.TABLE_CSV).write_text(as_csv(*(answer.raw if answer else raw(jobs))))


def _link(job: Path, folder: Path) -> str:
    return os.path.relpath(job / filenames.REPORT, folder) if (job / filenames.REPORT).is_file() else ""


def page(name: str, jobs: Sequence[Job], answer: Answer | None = None) -> Page:
    """The page of a sweep, or of a study where there is an answer."""
    results, order = [job.result for job in jobs], sorted(jobs, key=lambda job: summary.rank(job.result))
    ranked = [job.row for job in order]
    scale, heat = _Scale.of(ranked), HeatMap.of(ranked)
    claim, tone = (answer.question, "calm") if answer else _claim(ranked)
    return Page(
        name=name,
        claim=claim,
        basis=f"{len(results)} jobs: {summary.counted(row.verdict for row in ranked)}. {results[0].device_model}.",
        tone=tone,
        checks=checks(results),
        to_do=to_do(jobs),
        ranking=[Bar(row, scale.interval(row)) for row in ranked] if any(r.verdict.measured for r in results) else [],
        one=scale.x(1.0),
        heat=heat if heat.varies_both_ways else None,
        answer=answer,
        curves=[] if answer else [*map(Markup, curves(results))],
        heads=HEADS,
        rows=[_cells(row) for row in ranked],
    )


def _claim(ranked: Sequence[RankedRow]) -> tuple[str, str]:
    """The first sentence of a sweep's page, and its colour."""
    best = next((row for row in ranked if row.verdict is Verdict.FASTER), None)
    if best:
        return f"Fastest: {best.label}, at least {best.at_least}", "good"
    if any(row.verdict in (Verdict.SAME, Verdict.SLOWER) for row in ranked):
        return "Nothing is shown to be faster", "warn"
    timed = any(row.verdict not in (Verdict.PROFILED, Verdict.VERIFIED) for row in ranked)
    return f"Nothing {'is decided' if timed else 'was timed'}: {summary.counted(row.verdict for row in ranked)}", "warn"


def checks(results: Sequence[Result]) -> list[tuple[bool, str]]:
    """The number of verified jobs, and each job that is not, in words."""
    compared = [result for result in results if result.verdict is not Verdict.PROFILED]
    right = [result for result in compared if result.equivalence and result.equivalence.ok]
    found = (
        [(bool(right), f"{len(right)} of {len(compared)} jobs passed verification against fp64")] if compared else []
    )
    wrong = [
        r for r in compared if r.verdict in (Verdict.NOT_EQUIVALENT, Verdict.UNVERIFIED, Verdict.INVALID, Verdict.ERROR)
    ]
    return [*found, *((False, f"{r.workload} · {r.label}: {summary.reason(r) or r.verdict}") for r in wrong)]


def to_do(jobs: Sequence[Job]) -> tuple[str, list[tuple[str, str]]]:
    """The reader's next actions: take the surest stacks, else try what profiles propose, else decide what is open."""
    if found := commands(jobs):
        return "The surest stack of each workload:", found
    if found := suggestions(jobs):
        return "Try next:", found
    undecided = [front.undecided(job.result) for job in jobs if job.row.verdict is Verdict.INCONCLUSIVE]
    return "What is undecided:", [(text, "") for text in dict.fromkeys(undecided)]


def commands(jobs: Sequence[Job]) -> list[tuple[str, str]]:
    """For each workload the surest stack, and the command that repeats it."""
    best: dict[str, Job] = {}
    for job in (job for job in jobs if job.result.verdict is Verdict.FASTER):
        title = job.row.title
        best[title] = min(best.get(title, job), job, key=lambda job: summary.rank(job.result))
    return [(f"{title}: {job.row.strategy}", _command(job.folder)) for title, job in best.items()]


def suggestions(jobs: Sequence[Job]) -> list[tuple[str, str]]:
    """Proposals of profiles, if nothing was compared; each once, with all its programs."""
    said: dict[str, list[str]] = {}
    for job in jobs:
        if job.result.verdict is Verdict.PROFILED and (text := summary.suggestion(job.result)):
            said.setdefault(text, []).append(job.row.title)
    return [(f"{', '.join(programs)}: {text}", "") for text, programs in said.items()]


def _command(job: Path) -> str:
    overrides = job / filenames.HYDRA_OVERRIDES
    if not overrides.is_file():
        return ""
    typed = [str(word) for word in OmegaConf.load(overrides)]
    return shlex.join(
        ["python", "-m", "optexp", *(word for word in typed if not word.lstrip("+").startswith("study."))]
    )


# --- the ranking -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis of ratios, for all intervals of a page."""

    low: float
    high: float

    @classmethod
    def of(cls, rows: Sequence[RankedRow]) -> _Scale:
        shown = [row.speedup for row in rows if row.speedup and row.speedup.low > 0]
        ends = [1.0, *(s.low for s in shown), *(s.high if isfinite(s.high) else s.estimate for s in shown)]
        return cls(0.95 * min(ends), 1.05 * max(ends))

    def x(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return round(MARGIN + log(inside / self.low) / log(self.high / self.low) * (WIDTH - 2 * MARGIN), 1)

    def interval(self, row: RankedRow) -> tuple[float, float, float] | None:
        found = row.speedup
        return (self.x(found.low), self.x(found.high), self.x(found.estimate)) if found else None


# --- the table -------------------------------------------------------------------------------------------------


def _cells(row: RankedRow) -> list[str]:
    found = row.said
    ends = low_to_high(found.low, found.high).split(" to ") if found else ("", "")
    low, high = (f"{end}{row.slower}" for end in ends)
    job = row.link.partition("/")[0]
    return [
        job,
        row.title,
        row.strategy,
        str(row.verdict),
        low,
        row.estimate.replace("×", ""),
        high,
        row.time,
        row.memory,
        row.note,
    ]


def raw(jobs: Sequence[Job]) -> tuple[list[str], list[list[Any]]]:
    """The table as numbers, for other programs: times in µs, memory in MiB."""
    cells = list[list[Any]]()
    for job in jobs:
        row = job.row
        ends = [row.speedup.low, row.speedup.estimate, row.speedup.high] if row.speedup else [None] * 3
        cells.append([job.folder.name, row.title, row.strategy, str(row.verdict), *ends, row.step_us, row.peak_mib])
    return [*HEADS[:4], "speedup_low", "speedup", "speedup_high", "step_us", "peak_mib"], cells


def as_csv(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    return text.getvalue()
