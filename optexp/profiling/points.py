"""Operators beside the device's ceilings, and how far the host runs ahead of the device."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from statistics import median

from optexp.profiling.operators import repeated, shapes, times
from optexp.profiling.roofline import ceiling
from optexp.profiling.work import work
from optexp.records.profile import Calibration
from optexp.records.roofline import Ahead, RooflinePoint
from optexp.trace import Kernel, Op, Trace

MOST = 40  # points of a picture


@dataclass
class _Alike:
    """Calls of one operator with equal shapes; `us` over all steps."""

    op: Op
    calls: int = 0
    us: float = 0.0
    kernels: list[Kernel] = field(default_factory=list)


def points(trace: Trace, calibration: Calibration | None = None) -> list[RooflinePoint]:
    """Operators whose work their shapes tell, those with most time first; kernels of a graph have no operator.

    The time is the operator's own: of its kernels, or where the GPU did nothing, of the host.
    """
    found, on_gpu, twice = times(trace), trace.has_gpu, repeated(trace)
    own = found.device_self if on_gpu else [op.self_us for op in trace.ops]
    kernels = defaultdict[int | None, list[Kernel]](list)
    for kernel in trace.kernels:
        if kernel.op is not None and kernel.op.id is not None and not kernel.in_graph:
            kernels[kernel.op.id].append(kernel)
    alike: dict[tuple[str, str], _Alike] = {}
    for index, op in enumerate(trace.ops):
        outer = index
        while outer in twice:  # an overload of itself, whose time it is
            outer = trace.ops[outer].parent
        group = alike.setdefault((trace.ops[outer].name, shapes(trace.ops[outer])), _Alike(trace.ops[outer]))
        group.calls += outer == index
        group.us += own[index]
        group.kernels += kernels[op.id] if op.id is not None else []
    whole, steps = sum(own), len(trace.steps)
    rows = [point(group, steps, whole, calibration) for group in alike.values() if group.us and group.calls]
    return sorted((row for row in rows if row is not None), key=lambda row: -row.share)[:MOST]


def point(group: _Alike, steps: int, whole: float, calibration: Calibration | None) -> RooflinePoint | None:
    """One row; None where the shapes do not tell the work, or there is none."""
    of_call = work(group.op)
    if of_call is None or not of_call.bytes:
        return None
    calls, us = group.calls / steps, group.us / steps
    flops = of_call.flops * calls
    highest = ceiling(group.op, group.kernels, flops / us * 1e6, calibration) if flops and calibration else None
    return RooflinePoint(
        name=group.op.name,
        shapes=shapes(group.op),
        calls=calls,
        bytes=of_call.bytes * calls,
        flops=flops,
        traffic=of_call.traffic(),
        arithmetic=of_call.arithmetic(),
        share=group.us / whole if whole else 0.0,
        us=us,
        ceiling=highest,
    )


def ahead(trace: Trace) -> Ahead | None:
    """µs from the call of a launch to the start of its kernel or copy; None without any outside of graphs."""
    gaps = [k.start - k.launch.start for k in trace.kernels if k.launch is not None and not k.in_graph]
    gaps += [c.start - c.launch.start for c in trace.copies if c.launch is not None]
    return Ahead(median(gaps), max(gaps), len(gaps)) if gaps else None
