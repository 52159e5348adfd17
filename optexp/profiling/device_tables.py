"""Tables of a GPU's trace: calls of the CUDA API, copies by kind, and kernels by launch configuration; of one step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from optexp.records.profile import ApiEntry, CopyEntry, LaunchEntry
from optexp.trace import Kernel, Trace, short_name


def api_calls(trace: Trace) -> list[ApiEntry]:
    """Functions of the runtime and the driver, those with most host time first."""
    times = defaultdict[str, list[float]](list)
    for call in trace.api:
        times[call.name].append(call.duration)
    steps, whole = len(trace.steps), sum(call.duration for call in trace.api)
    rows = [
        ApiEntry(name, len(spans_us) / steps, sum(spans_us) / whole if whole else 0.0, sum(spans_us) / steps)
        for name, spans_us in times.items()
    ]
    return sorted(rows, key=lambda row: -row.share)


@dataclass
class _Copies:
    count: int = 0
    bytes: int = 0
    pageable: int = 0
    us: float = 0.0


def copies(trace: Trace) -> list[CopyEntry]:
    """Copies and fills by kind, those with most time first."""
    kinds = defaultdict[str, _Copies](_Copies)
    for copy in trace.copies:
        row = kinds[copy.kind]
        row.count += 1
        row.bytes += copy.bytes
        row.pageable += copy.bytes if copy.pageable else 0
        row.us += copy.duration
    steps = len(trace.steps)
    rows = [
        CopyEntry(kind, row.count / steps, row.bytes / steps, row.pageable / steps, row.us / steps)
        for kind, row in kinds.items()
    ]
    return sorted(rows, key=lambda row: -(row.us or 0.0))


def launches(trace: Trace) -> list[LaunchEntry]:
    """Kernels by name, grid and block, those with most time first."""
    alike = defaultdict[tuple[object, ...], list[Kernel]](list)
    for kernel in trace.kernels:
        alike[kernel.name, kernel.grid, kernel.block, kernel.in_graph].append(kernel)
    steps, rows = len(trace.steps), []
    for kernels in alike.values():
        one = kernels[0]
        waves = one.blocks / trace.multiprocessors if one.blocks and trace.multiprocessors else None
        known = [kernel.launch.duration for kernel in kernels if kernel.launch and not kernel.in_graph]
        rows.append(
            LaunchEntry(
                short_name(one.name),
                _text(one.grid),
                _text(one.block),
                len(kernels) / steps,
                one.in_graph,
                waves,
                sum(kernel.duration for kernel in kernels) / steps,
                sum(known) / steps if known else None,
            )
        )
    return sorted(rows, key=lambda row: -(row.us or 0.0))


def _text(size: Sequence[int]) -> str:
    return "×".join(map(str, size))
