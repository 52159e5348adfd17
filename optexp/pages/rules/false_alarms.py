"""Programs against themselves, and with a known delay: how often the measurement is wrong, and what it finds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from optexp.reporting import markdown

EQUAL = ("A/A", "step", "n", "FASTER or SLOWER", "SAME", "INCONCLUSIVE", "processes", "half-width", "going first")
DELAYED = ("known delay", "n", "found (interval excludes 1)", "called SLOWER", "median estimate")

Rows = Sequence[Mapping[str, Any]]


def text(rows: Rows) -> str:
    """rows: one for each comparison: `workload`, `delay` (0: equal arms), `verdict`, `interval` (estimate, low, high),
    `processes`, `step_us`, `going_first` (log-ratio)
    """
    workloads = [*dict.fromkeys(row["workload"] for row in rows), None]
    same = [equal(name, found) for name in workloads if (found := of(rows, name, 0.0))]
    delays = sorted({row["delay"] for row in rows} - {0.0})
    later = [delayed(d, name, found) for d in delays for name in workloads if (found := of(rows, name, d))]
    return "\n\n".join([markdown.table(EQUAL, same), *([markdown.table(DELAYED, later)] if later else [])])


def of(rows: Rows, workload: str | None, delay: float) -> Rows:
    """workload: None for all"""
    return [row for row in rows if workload in (None, row["workload"]) and row["delay"] == delay]


def equal(workload: str | None, found: Rows) -> list[str]:
    """Verdicts of equal arms, and by how much a step takes longer for going first."""
    verdicts = [row["verdict"] for row in found]
    wrong = sum(verdict in ("FASTER", "SLOWER") for verdict in verdicts)
    step_us, longer, processes = (
        median(row[name] for row in found) for name in ("step_us", "going_first", "processes")
    )
    half = median((row["interval"][2] - row["interval"][1]) / 2 for row in found)
    counts = [f"{wrong} ({wrong / len(found):.1%})", str(verdicts.count("SAME")), str(verdicts.count("INCONCLUSIVE"))]
    step = f"{step_us:.0f} µs" if workload else ""
    return [workload or "all", step, str(len(found)), *counts, f"{processes:.0f}", f"{half:.2%}", f"{longer:+.2%}"]


def delayed(delay: float, workload: str | None, found: Rows) -> list[str]:
    """How many delays were found."""
    seen = sum(row["interval"][2] < 1 for row in found)
    slower = sum(row["verdict"] == "SLOWER" for row in found)
    estimate = median(1 / row["interval"][0] for row in found) - 1
    name = f"{delay:.0%}, {workload or 'all'}"
    return [name, str(len(found)), f"{seen} ({seen / len(found):.0%})", str(slower), f"{estimate:+.2%}"]
