"""Device and host times of the kernels, beside their alternatives, and the pictures over size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from optexp.kernelkit.benchmark.report import report
from optexp.kernelkit.benchmark.rows import HostCost, Row
from optexp.records.profile import Calibration


def text(
    rows: Sequence[Mapping[str, Any]], costs: Sequence[Mapping[str, Any]], ceilings: Mapping[str, Any], torch: str,
    plots: Sequence[str],
) -> str:  # fmt: skip
    """rows: of `Row`;  costs: of `HostCost`;  ceilings: of `Calibration`;  torch: its version;  plots: kernels"""
    found = [Row(**row) for row in rows]
    host = msgspec.convert(costs, list[HostCost])
    tables = report(found, host, Calibration.from_dict(ceilings), torch)
    pictures = "\n".join(f"![{name}](plots/{name}.svg)" for name in plots)
    return f"{goals(found)}\n\n{tables}" + (f"\nOver size, bfloat16, cold:\n\n{pictures}" if plots else "")


def goals(rows: Sequence[Row]) -> str:
    """How many rows with a goal meet it, and every row that misses its goal or is slower than an alternative."""
    asked = [row for row in rows if row.goal and row.ratio]
    met = sum(row.ratio <= row.goal for row in asked if row.ratio and row.goal)
    missed = [sentence for row in rows for sentence in row.missed()]
    lines = [f"{met} of {len(asked)} goals are met.", *(f"- {sentence}" for sentence in missed)]
    return "\n\n".join([lines[0], *(["\n".join(lines[1:])] if missed else [])])
