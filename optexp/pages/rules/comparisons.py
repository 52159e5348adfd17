"""A row for each comparison: its command, both times, the interval and the processes that it rests on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from optexp.pages import jobs
from optexp.reporting import markdown
from optexp.result import Result
from optexp.support.units import at_least, low_to_high, mebibytes, microseconds, ratio, share

HEADS = ("command", "verdict", "baseline", "candidate", "at least", "estimate", "interval", "processes", "peak memory")
CHECKED = ("input sets", "most of a limit")  # of a comparison that times nothing


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: of `optexp.pages.jobs.row`"""
    cells = [_cells(row["typed"], jobs.result(row)) for row in rows]
    heads = [*HEADS, *CHECKED]
    filled = [index for index in range(len(heads)) if any(row[index] for row in cells)]
    return markdown.table([heads[i] for i in filled], [[row[i] for i in filled] for row in cells])


def _cells(typed: str, result: Result) -> list[str]:
    times = [microseconds(arm.step_us) if arm.step_us else "" for arm in (result.baseline, result.candidate)]
    return [f"`{typed}`", str(result.verdict), *times, *_speedup(result), *_checked(result)]


def _speedup(result: Result) -> list[str]:
    if (found := result.speedup) is None:
        return [""] * 5
    peaks = [mebibytes(arm.peak_mib) for arm in (result.baseline, result.candidate) if arm.peak_mib is not None]
    interval = low_to_high(found.low, found.high)
    memory = " → ".join(peaks) if len(peaks) == 2 else ""
    return [f"{at_least(found.low)}×", ratio(found.estimate), interval, str(found.processes), memory]


def _checked(result: Result) -> list[str]:
    found = result.equivalence
    if found is None or result.speedup is not None:
        return ["", ""]
    return [
        str(len(found.seeds)),
        f"{share(found.worst.used)} ({found.worst.gate} {found.worst.tensor})" if found.worst else "",
    ]
