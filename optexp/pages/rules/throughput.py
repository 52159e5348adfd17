"""A suite of candidates on one card: wall seconds a candidate, by the number that is judged at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optexp.reporting import markdown


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: one for each run: `files`, `at_once`, `seconds` of the whole run, `verdicts` (how many of each)"""
    heads = ["files", "at once", "wall seconds", "seconds a file", "verdicts"]
    return markdown.table(heads, list(map(cells, rows)))


def cells(row: Mapping[str, Any]) -> list[str]:
    told = ", ".join(f"{count} {verdict}" for verdict, count in row["verdicts"].items())
    each_s = row["seconds"] / sum(row["verdicts"].values())
    return [row["files"], str(row["at_once"]), f"{row['seconds']:.0f}", f"{each_s:.0f}", told]
