"""report.html of a sweep or a study: one page for all jobs, with a link to each, and its table as CSV and Markdown."""

from __future__ import annotations

import csv
import io
import os
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, log
from pathlib import Path
from typing import Any

from markupsafe import Markup
from omegaconf import OmegaConf

from optexp.records import filenames
from optexp.reporting import front, markdown, report, summary
from optexp.reporting.titles import titles
from optexp.result import ArmSummary, Result, Verdict
from optexp.support.units import at_least, ratio
from optexp.sweeps import plot, study
from optexp.sweeps.curves import curves

WIDTH, MARGIN = 300, 8  # of an interval, in pixels
HEADS = [
    "job",
    "workload",
    "strategy",
    "verdict",
    "at least",
    "estimate",
    "at most",
    "time/step",
    "peak memory",
    "note",
]


@dataclass(frozen=True)
class Job:
    """A job of the sweep.

    title: workload with the settings in which the jobs differ
    link:  to its page, relative to the sweep's folder; empty where there is none
    """

    folder: Path
    result: Result
    title: str
    link: str

    @property
    def label(self) -> str:
        """Workload and stack."""
        return f"{self.title} · {self.result.label}"


@dataclass(frozen=True)
class Row:
    """A job's line in the ranking.

    link:     see `Job`
    interval: left end, right end and estimate in pixels; None where no speedup may be shown
    """

    label: str
    verdict: str
    tone: str
    said: str
    link: str
    interval: tuple[float, float, float] | None


@dataclass(frozen=True)
class Cell:
    """verdict: empty where no job had this pair"""

    verdict: str = ""
    tone: str = "none"
    said: str = ""
    link: str = ""


@dataclass(frozen=True)
class Heat:
    """Verdicts by workload and strategy."""

    columns: list[str]
    rows: list[tuple[str, list[Cell]]]


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
    def of(cls, asked: study.Study, found: Sequence[study.Point]) -> Answer:
        """The answer that points give."""
        heads, rows = study.table(asked, found)
        return cls(
            question=asked.question,
            pictures=[*map(Markup, plot.as_svg(asked, found))],
            told=plot.tell(asked, found),
            remarks=study.remarks(asked, found),
            heads=heads,
            rows=rows,
            raw=study.raw(asked, found),
        )


@dataclass(frozen=True)
class Page:
    """one: place of a ratio of 1 in each interval, in pixels;  curves: panels as SVG, of a sweep over a number"""

    name: str
    claim: str
    basis: str
    tone: str
    checks: list[tuple[bool, str]]
    to_do: list[tuple[str, str]]
    ranking: list[Row]
    one: float
    heat: Heat | None
    answer: Answer | None
    curves: list[Markup] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)


def write(name: str, jobs: Mapping[Path, Result], folder: Path, answer: Answer | None = None) -> None:
    """The page, and its table in two formats, into the sweep's folder."""
    made = page(name, jobs, folder, answer)
    (folder / filenames.REPORT).write_text(report.templates().get_template("sweep.html.j2").render(page=made))
    heads, rows = (answer.heads, answer.rows) if answer else (made.heads, made.rows)
    (folder / filenames.TABLE_MARKDOWN).write_text(markdown.table(heads, rows) + "\n")
    (folder / filenames.TABLE_CSV).write_text(as_csv(*(answer.raw if answer else raw(jobs))))


def page(name: str, jobs: Mapping[Path, Result], folder: Path, answer: Answer | None = None) -> Page:
    """The page of a sweep.

    Args:
        jobs: Results by the jobs' folders.
        folder: Of the sweep; links are relative to it.
        answer: Of a study; None for a plain sweep.
    """
    results = list(jobs.values())
    every = [
        Job(job, result, title, _link(job, folder))
        for (job, result), title in zip(jobs.items(), titles(results), strict=True)
    ]
    order = sorted(every, key=lambda job: summary.rank(job.result))
    best = next((job for job in order if job.result.verdict is Verdict.FASTER), None)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(r.verdict for r in results).items())
    if answer:
        claim, tone = answer.question, "calm"
    elif best and best.result.speedup:
        claim, tone = f"Fastest: {best.label}, at least {at_least(best.result.speedup.low)}×", "good"
    else:
        claim, tone = "Nothing was faster", "warn"
    scale = _Scale.of(results)
    return Page(
        name=name,
        claim=claim,
        basis=f"{len(results)} jobs: {counts}. {results[0].device_model}.",
        tone=tone,
        checks=checks(results),
        to_do=commands(every) or suggestions(every),
        ranking=[_row(job, scale) for job in order] if any(r.verdict.measured for r in results) else [],
        one=scale.x(1.0),
        heat=heat(order),
        answer=answer,
        curves=[] if answer else [*map(Markup, curves(results))],
        heads=HEADS,
        rows=[_cells(job) for job in order],
    )


def _link(job: Path, folder: Path) -> str:
    return os.path.relpath(job / filenames.REPORT, folder) if (job / filenames.REPORT).is_file() else ""


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


def commands(jobs: Sequence[Job]) -> list[tuple[str, str]]:
    """For each workload the surest stack, and the command that repeats it."""
    best: dict[str, Job] = {}
    for job in (job for job in jobs if job.result.verdict is Verdict.FASTER):
        best[job.title] = min(best.get(job.title, job), job, key=lambda job: summary.rank(job.result))
    return [(f"{job.title}: {job.result.label}", _command(job.folder)) for job in best.values()]


def suggestions(jobs: Sequence[Job]) -> list[tuple[str, str]]:
    """Proposals of profiles, if nothing was compared; each once, with all its programs."""
    said: dict[str, list[str]] = {}
    for job in jobs:
        if job.result.verdict is Verdict.PROFILED and (text := summary.suggestion(job.result)):
            said.setdefault(text, []).append(job.title)
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
    def of(cls, results: Sequence[Result]) -> _Scale:
        shown = [r.speedup for r in results if r.speedup and r.speedup.low > 0]
        ends = [1.0, *(s.low for s in shown), *(s.high if isfinite(s.high) else s.estimate for s in shown)]
        return cls(0.95 * min(ends), 1.05 * max(ends))

    def x(self, value: float) -> float:
        inside = min(max(value, self.low), self.high)
        return round(MARGIN + log(inside / self.low) / log(self.high / self.low) * (WIDTH - 2 * MARGIN), 1)


def _row(job: Job, scale: _Scale) -> Row:
    result = job.result
    found = result.speedup if result.verdict.measured else None
    ends = (scale.x(found.low), scale.x(found.high), scale.x(found.estimate)) if found else None
    return Row(job.label, result.verdict, front.tone(result.verdict), said(result), job.link, ends)


def said(result: Result) -> str:
    """A speedup with its interval, the reason where there is none, "undecided" where nothing follows from it."""
    found = result.speedup
    if not found or not result.verdict.measured:
        return summary.reason(result)
    ends = f"{at_least(found.low)} to {f'{found.high:.3g}' if isfinite(found.high) else '∞'}"
    return f"undecided, {ends}" if result.verdict is Verdict.INCONCLUSIVE else f"{ratio(found.estimate)} ({ends})"


def heat(ranked: Sequence[Job]) -> Heat | None:
    """Workloads by strategies; None where one of them does not vary, or where nothing is compared.

    Of jobs with the same workload and strategy the one with the higher rank is shown.
    """
    compared = [job for job in ranked if job.result.verdict is not Verdict.PROFILED]
    columns = list(dict.fromkeys(job.result.label for job in compared))
    cells: dict[str, dict[str, Cell]] = {}
    for job in compared:
        result = job.result
        short = f"≥ {at_least(result.speedup.low)}×" if result.speedup and result.verdict is Verdict.FASTER else ""
        short = short or (ratio(result.speedup.estimate) if result.speedup and result.verdict is Verdict.SLOWER else "")
        cell = Cell(result.verdict, front.tone(result.verdict), short, job.link)
        cells.setdefault(job.title, {}).setdefault(result.label, cell)
    if len(columns) < 2 or len(cells) < 2:
        return None
    return Heat(columns, [(title, [row.get(name, Cell()) for name in columns]) for title, row in cells.items()])


# --- the table -------------------------------------------------------------------------------------------------


def _cells(job: Job) -> list[str]:
    result = job.result
    found, arm = result.speedup if result.verdict.measured else None, _timed(result)
    ends = [f"{at_least(found.low)}", f"{found.estimate:.3g}", f"{found.high:.3g}"] if found else ["", "", ""]
    return [
        job.link.partition("/")[0],
        job.title,
        result.label,
        str(result.verdict),
        *ends,
        summary.microseconds(arm.step_us) if arm.step_us else "",
        summary.mebibytes(arm.peak_mib) if arm.peak_mib else "",
        summary.reason(result),
    ]


def _timed(result: Result) -> ArmSummary:
    """The arm that a row is about, without times where the verdict lets none be shown."""
    shown = summary.shown(result)
    return shown if result.verdict.measured or result.verdict is Verdict.PROFILED else shown.untimed()


def raw(jobs: Mapping[Path, Result]) -> tuple[list[str], list[list[Any]]]:
    """The table as numbers, for other programs: times in µs, memory in MiB."""
    rows = list[list[Any]]()
    for (job, result), title in zip(jobs.items(), titles([*jobs.values()]), strict=True):
        found, arm = result.speedup if result.verdict.measured else None, _timed(result)
        ends = [found.low, found.estimate, found.high] if found else [None] * 3
        rows.append([job.name, title, result.label, str(result.verdict), *ends, arm.step_us, arm.peak_mib])
    return [*HEADS[:4], "speedup_low", "speedup", "speedup_high", "step_us", "peak_mib"], rows


def as_csv(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([heads, *rows])
    return text.getvalue()
