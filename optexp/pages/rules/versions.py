"""Two versions whose difference is known: verdicts by delay, and the estimates of those that show one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from statistics import median
from typing import Any

from optexp.reporting import markdown
from optexp.support.units import duration

VERDICTS = ("SLOWER", "FASTER", "SAME", "INCONCLUSIVE", "INVALID")
HEADS = ("device", "compared", "delay", "n", *VERDICTS, "excludes 1", "median step", "median estimate",
         "median half-width", "seconds each")  # fmt: skip

Rows = Sequence[Mapping[str, Any]]


def text(rows: Rows) -> str:
    """rows: one for each comparison: `device`, `name` (of the device), `kind`, `delay`, `verdict`, `speedup` (estimate,
    low, high), `base_us`, `seconds`
    """
    groups = sorted({(row["device"], row["kind"], row["delay"]) for row in rows})
    lines = [cells([row for row in rows if (row["device"], row["kind"], row["delay"]) == group]) for group in groups]
    return markdown.table(HEADS, lines)


def cells(found: Rows) -> list[str]:
    """Of one device, kind and delay."""
    shown = [row["speedup"] for row in found if row["speedup"]]
    ends = [(s["low"], s["high"] or inf) for s in shown]
    verdicts = [row["verdict"] for row in found]
    steps = [row["base_us"] for row in found if row["base_us"]]
    counts = [len(found), *map(verdicts.count, VERDICTS), sum(not low <= 1 <= high for low, high in ends)]
    step = duration(median(steps) / 1e6) if steps else "–"
    estimate = f"{1 / median(s['estimate'] for s in shown) - 1:+.2%}" if shown else "–"
    half = f"{median((high - low) / 2 for low, high in ends):.2%}" if ends else "–"
    seconds = f"{median(row['seconds'] for row in found):.0f}"
    first = found[0]
    return [first["name"], first["kind"], f"{first['delay']:.0%}", *map(str, counts), step, estimate, half, seconds]
