"""Seconds of a command by phase, one column for each preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optexp.reporting import markdown

PHASES = ("import", "arms", "verification", "profile", "measurement", "record", "tracking")


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: one for each preset: `preset`, `processes`, `seconds` by phase, `wall_s` of the whole command"""
    heads = [f"{row['preset']} ({row['processes']} process{'es' if row['processes'] != 1 else ''})" for row in rows]
    lines = [[phase, *(f"{row['seconds'].get(phase, 0.0):.1f}" for row in rows)] for phase in PHASES]
    lines.append(["whole command", *(f"{row['wall_s']:.1f}" for row in rows)])
    shares = (1 - row["seconds"].get("measurement", 0.0) / row["wall_s"] for row in rows)
    lines.append(["not measuring", *(f"{share:.0%}" for share in shares)])
    return markdown.table(["seconds", *heads], lines)
