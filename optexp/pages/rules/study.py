"""The table of a study: a row for each of its points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from optexp.pages import jobs
from optexp.reporting import markdown
from optexp.schema import typed
from optexp.sweeps.study import Study, completed, points
from optexp.sweeps.study_table import table

SENTENCES = "why"  # a column of the study's own page, too wide for a result page


def text(rows: Sequence[Mapping[str, Any]], study: Mapping[str, Any]) -> str:
    """rows: of `optexp.pages.jobs.row`;  study: the fields of `optexp.sweeps.study.Study`"""
    finished = [(jobs.result(row), row["step"]) for row in rows]
    asked = typed(Study, dict(study), "study")
    asked = replace(asked, tell=[name for name in asked.tell if name != SENTENCES])
    asked = completed(asked, finished)
    return markdown.table(*table(asked, points(asked, finished)))
