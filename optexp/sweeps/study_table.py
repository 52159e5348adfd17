"""The table of a study, as text, as numbers and as a page, and what a reader of it must know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optexp.reporting.markdown import table as in_markdown
from optexp.schema import suggest
from optexp.support.units import ratio, share
from optexp.sweeps.figures import FIGURES, Point, heading, of_ceiling
from optexp.sweeps.study import Study, between_jobs

APART = 1.1  # between runs of one program, above which a reader is told
NO_NOISE = "No program ran twice, so what noise is stays unknown"
OVER = 1.1  # of a ceiling: what a smaller or larger product than the calibration's may reach


def table(study: Study, found: Sequence[Point]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows, in the order of the jobs; columns that nothing fills are left out."""
    rows = [[*(point.cell(name) for name in study.columns), point.verdict] for point in found]
    names = [*(heading(name) for name in study.columns), "verdict"]
    filled = [index for index in range(len(names)) if any(row[index] for row in rows)]
    return [names[i] for i in filled], [[row[i] for i in filled] for row in rows]


def raw(study: Study, found: Sequence[Point]) -> tuple[list[str], list[list[Any]]]:
    """The same as numbers, for other programs: names as the study has them, values in the unit of records."""
    ends = ("low", "high")
    rows = [
        [*(point.value(name) for name in study.columns), *_ends(point), _decided(point), point.arm] for point in found
    ]
    return [*study.columns, *(f"speedup_{end}" for end in ends), "verdict", "of"], rows


def _decided(point: Point) -> str:
    return "" if point.arm == "baseline" and point.result.strategy else str(point.result.verdict)


def _ends(point: Point) -> tuple[float | None, float | None]:
    return point.interval("speedup") or (None, None)


def markdown(name: str, study: Study, found: Sequence[Point], picture: str | None = None) -> str:
    """The study as a page: question, table, picture, and where it was measured."""
    parts = [f"## {name}", study.question, in_markdown(*table(study, found))]
    if picture:
        parts.append(f"![{name}]({picture})")
    return "\n\n".join([*parts, *remarks(study, found), _where(found)]) + "\n"


def _where(found: Sequence[Point]) -> str:
    result = found[0].result
    preset = result.config.get("measurement")
    facts = [result.device_model, f"torch {result.environment.get('torch')}"]
    return ", ".join([*facts, *([f"measurement={preset}"] if preset else [])]) + "."


def remarks(study: Study, found: Sequence[Point]) -> list[str]:
    """Warnings for readers of the table: names that no job has, and ceilings that cannot be right."""
    settings = dict.fromkeys(key for point in found for key in point.result.config)
    sentences = [
        f"study: no job has {name!r}{suggest(name, [*FIGURES, *settings])}"
        for name in study.columns
        if name not in FIGURES and name not in settings and not any(name in point.metrics for point in found)
    ]
    highest = max((of_ceiling(point) or 0.0 for point in found), default=0.0)
    if "of_ceiling" in study.columns and highest > OVER:
        sentences.append(
            f"The measured ceiling is too low, since a product reached {share(highest)} of it: shares of it say"
            " nothing here. Ceilings are measured once and cached, perhaps while something else ran: remove"
            " calibration-*.json from ~/.cache/optexp and run again on a quiet machine."
        )
    noise = between_jobs(found)
    if any(point.cell("gain") for point in found) and "gain" in study.columns:
        known = f"Runs of one program differed by up to {noise - 1:.1%} here: less is noise" if noise else NO_NOISE
        sentences.append(f"{heading('gain')}: of jobs that ran one after the other, so it has no interval. {known}.")
    elif noise and noise > APART:
        sentences.append(
            f"Jobs measured the same baseline up to {ratio(noise)} apart: compare rows by their speedups, each over a"
            " baseline that ran beside it."
        )
    return sentences
