"""Who else is on the card: another program's work there is in every figure measured beside it."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from optexp.measurement.gpu import Gpu, Read, Reading


def neighbours(gpu: Gpu, ours: Collection[int] = (), since_s: float | None = None) -> tuple[list[str], int]:
    """Foreign processes in words, and how many ids mean nothing here (another container's, or our own seen from there).

    ours:     arms; what they started is ours too
    since_s:  Unix time: who asked for this comparison (a notebook, say) may hold memory, but not compute since then
    """
    busy = set() if since_s is None else gpu.busy(since_s)
    callers = lineage(os.getpid())
    found, hidden = [], 0
    for pid, memory in gpu.processes().items():
        above = lineage(pid)
        if not above:
            hidden += 1
        elif not set(above) & set(ours) and (pid not in callers or pid in busy):
            size = f", {memory / 2**20:.0f} MiB" if memory else ""
            found.append(f"process {pid} ({_name(pid)}{size})")
    return found, hidden


def looking_out(gpu: Gpu, ours: Collection[int], since_s: float, met: dict[str, str]) -> Read:
    """Reads the card, and whenever others are on it than the last time, who: one may be gone again before the end."""
    last = set[int]()

    def read() -> Reading | None:
        nonlocal last
        if (there := set(gpu.processes())) != last:
            last = there
            met.update({text.partition(",")[0]: text for text in neighbours(gpu, ours, since_s)[0]})
        return gpu.read()

    return read


def lineage(pid: int) -> list[int]:
    """A process, its parent, and so on; nothing where no such process can be seen."""
    above: list[int] = []
    while pid > 0:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return above
        above.append(pid)
        pid = int(stat.rpartition(")")[2].split()[1])
    return above


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended since"
