"""Seconds of the verification of large tensors, by part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optexp.reporting import markdown


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: one for each command: `command`, `verdict`, `seconds` by part, `verification_s`, `wall_s`"""
    parts = sorted(
        {part for row in rows for part in row["seconds"]}, key=lambda part: -rows[0]["seconds"].get(part, 0.0)
    )
    lines = [[part, *(f"{row['seconds'].get(part, 0.0):.2f}" for row in rows)] for part in parts]
    lines.append(["other", *(f"{row['verification_s'] - sum(row['seconds'].values()):.2f}" for row in rows)])
    lines.append(["verification", *(f"{row['verification_s']:.2f}" for row in rows)])
    lines.append(["whole command", *(f"{row['wall_s']:.2f}" for row in rows)])
    lines.append(["verdict", *(row["verdict"] for row in rows)])
    return markdown.table(["seconds", *(f"`{row['command']}`" for row in rows)], lines)
