"""KernelBench's problem files under a strategy: verdict, speedup, and seconds by phase."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from optexp.reporting import markdown

PHASES = ("arms", "verification", "profile", "measurement")
KEYS = (
    "problem",
    "verdict",
    "speedup",
    "bound",
    "phases",
    "seconds",
)  # of a line of `optexp.judge` that the table shows


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: lines of `python -m optexp.judge`, with KEYS"""
    counts = Counter(row["verdict"] for row in rows)
    heads = ["problem", "verdict", "speedup", "step over its bound", *PHASES, "in all"]
    told = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    ordered = sorted(rows, key=lambda row: _natural(row["problem"]))
    return f"{len(rows)} files: {told}. Seconds by phase:\n\n{markdown.table(heads, list(map(cells, ordered)))}"


def _natural(name: str) -> list[tuple[int, str]]:
    """2_b comes before 10_a."""
    return [(int(part or 0), text) for part, text in re.findall(r"(\d*)(\D+)", name)]


def cells(row: Mapping[str, Any]) -> list[str]:
    found, bound, phases = row["speedup"], row["bound"] or {}, row["phases"] or {}
    speedup = f"{found['estimate']:.2f}× ({found['low']:.2f} to {found['high']:.2f})" if found else ""
    over = f"{bound['ratio']:.1f}" if bound.get("ratio") else "–"
    seconds = [f"{phases[name]:.0f}" if name in phases else "" for name in PHASES]
    return [row["problem"], row["verdict"], speedup, over, *seconds, f"{row['seconds']:.0f}"]
