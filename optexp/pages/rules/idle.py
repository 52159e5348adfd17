"""Idle share of a GPU in traces, by optexp's breakdown and by another tool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optexp.reporting import markdown

LIMITS = (0.2, 2.0)  # points


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: one for each trace: `trace`, `ours` and `theirs` (%; None where that tool does not read it)"""
    apart = sorted((abs(row["ours"] - row["theirs"]) for row in rows if row["theirs"] is not None), reverse=True)
    counts = [
        [f"at most {limit:g} points apart", f"{sum(value <= limit for value in apart)} of {len(apart)}"]
        for limit in LIMITS
    ]
    counts += [["not read by the other tool", str(len(rows) - len(apart))]]
    return markdown.table(
        ["idle share of", "traces"], [*counts, ["largest difference", f"{max(apart, default=0.0):.1f} points"]]
    )
