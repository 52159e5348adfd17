"""Groups of tests on a GPU: how many passed, which failed, and how each group ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optexp.reporting import markdown

HEADS = ("group", "passed", "failed", "skipped", "seconds", "ended", "failed tests")


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: one for each group: `group`, `outcomes` (by outcome), `failures` (names), `seconds`, `ended`, `commit`"""
    return markdown.table([*HEADS, "commit"], list(map(cells, rows)))


def cells(row: Mapping[str, Any]) -> list[str]:
    counts = [str(row["outcomes"].get(name, 0)) for name in ("passed", "failed", "skipped")]
    failures = "; ".join(f"`{name}`" for name in row["failures"])
    return [row["group"], *counts, f"{row['seconds']:.0f}", row["ended"], failures, row["commit"]]
