"""One kernel by optexp's clock, by CUPTI and by Triton's do_bench."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optexp.reporting import markdown

HEADS = (
    "kernel", "wall", "device", "CUPTI", "device/CUPTI", "same calls", "device, cold L2", "`do_bench`",
    "cold/`do_bench`",
)  # fmt: skip


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: one for each kernel, µs of a call: `wall`, `device`, `cupti`, `same_calls` (by our clock, of the calls that
    `cupti` is of), `cold`, `do_bench`
    """
    return markdown.table(HEADS, list(map(cells, rows)))


def cells(row: Mapping[str, Any]) -> list[str]:
    wall, device, cupti, cold, bench = (f"{row[key]:.2f} µs" for key in ("wall", "device", "cupti", "cold", "do_bench"))
    beside = [f"{row[key] / row['cupti'] - 1:+.1%}" for key in ("device", "same_calls")]
    return [row["kernel"], wall, device, cupti, *beside, cold, bench, f"{row['cold'] / row['do_bench'] - 1:+.1%}"]
