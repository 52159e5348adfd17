"""Other programs on the card: their work distorts every figure measured beside it."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

from optexp.measurement.gpu import Gpu, Read, Reading
from optexp.support.pausing import is_paused


def neighbours(
    gpu: Gpu, ours: Collection[int] = (), since_s: float | None = None, pausing: Collection[int] = ()
) -> tuple[list[str], int]:
    """Foreign processes in words, and the number of process ids that are unknown here (those of other containers).

    ours:     arms; processes that they started are ours too
    since_s:  Unix time: a parent of this process (such as a notebook) is foreign only if it computed after this moment
    pausing:  a process whose descendants are paused: one of them is foreign only if it computed after this moment, or
              is not paused
    """
    busy = set() if since_s is None else gpu.busy(since_s)
    callers = lineage(os.getpid())
    foreign, hidden = [], 0
    for pid, memory in gpu.processes().items():
        ancestors = lineage(pid)
        if not ancestors:
            hidden += 1
        elif set(ancestors) & set(ours) or (pid not in busy and set(ancestors) & set(pausing) and is_paused(pid)):
            continue
        elif pid not in callers or pid in busy:
            size = f", {memory / 2**20:.0f} MiB" if memory else ""
            foreign.append(f"process {pid} ({_name(pid)}{size})")
    return foreign, hidden


def looking_out(
    gpu: Gpu, ours: Collection[int], since_s: float, met: dict[str, str], pausing: Collection[int] = ()
) -> Read:
    """A function that reads the card and, when its processes change, adds foreign ones to `met`: one may end early."""
    last = set[int]()

    def read() -> Reading | None:
        nonlocal last
        if (present := set(gpu.processes())) != last:
            last = present
            met.update({text.partition(",")[0]: text for text in neighbours(gpu, ours, since_s, pausing)[0]})
        return gpu.read()

    return read


def lineage(pid: int) -> list[int]:
    """Process ids of a process, its parent, and so on; empty where the process cannot be seen."""
    ancestors: list[int] = []
    while pid > 0:
        try:
            stat = Path(f"/proc/{pid}/stat").read_text()
        except OSError:
            return ancestors
        ancestors.append(pid)
        pid = int(stat.rpartition(")")[2].split()[1])
    return ancestors


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "ended since"
