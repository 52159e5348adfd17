"""Points of a roofline: operators against the device's ceilings; and how far the host runs ahead of the device."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from math import prod
from statistics import median

from optexp.profiling.operators import repeated, shapes, times
from optexp.profiling.roofline import ceiling
from optexp.profiling.work import Work, work
from optexp.records.profile import Calibration
from optexp.records.roofline import Ahead, RooflinePoint
from optexp.trace import Kernel, Op, Trace

MOST = 40  # most points in a picture
ONE_EACH = re.compile(r"aten::(add|sub|rsub|mul|div|neg|relu|maximum|minimum|sum|mean|amax|amin|max|min|abs)_?")


@dataclass
class _Alike:
    """Calls of one operator with equal shapes; `us` over all steps."""

    op: Op
    calls: int = 0
    us: float = 0.0
    kernels: list[Kernel] = field(default_factory=list)


def points(trace: Trace, calibration: Calibration | None = None) -> list[RooflinePoint]:
    """Operators whose shapes determine their work, those with most time first. Kernels of a graph have no operator.

    The time is the operator's own: of its kernels or, without a GPU, of the host.
    """
    found, on_gpu, twice = times(trace), trace.has_gpu, repeated(trace)
    own = found.device_self if on_gpu else [op.self_us for op in trace.ops]
    kernels = defaultdict[int | None, list[Kernel]](list)
    for kernel in trace.kernels:
        if kernel.op is not None and kernel.op.id is not None and not kernel.in_graph:
            kernels[kernel.op.id].append(kernel)
    alike: dict[tuple[str, str], _Alike] = {}
    idle = set() if on_gpu else delegating(trace)
    for index, op in enumerate(trace.ops):
        if index in idle:
            continue
        outer = index
        while outer in twice:  # an overload: its time belongs to the caller of the same name
            outer = trace.ops[outer].parent
        group = alike.setdefault((trace.ops[outer].name, shapes(trace.ops[outer])), _Alike(trace.ops[outer]))
        group.calls += outer == index
        group.us += own[index]
        group.kernels += kernels[op.id] if op.id is not None else []
    whole, steps = sum(own), len(trace.steps)
    rows = [point(group, steps, whole, calibration) for group in alike.values() if group.us and group.calls]
    return sorted((row for row in rows if row is not None), key=lambda row: -row.share)[:MOST]


def point(group: _Alike, steps: int, whole: float, calibration: Calibration | None) -> RooflinePoint | None:
    """One row; None where the shapes do not determine the work, or there is none."""
    of_call = counted(group.op)
    if of_call is None or not of_call.bytes:
        return None
    calls, us = group.calls / steps, group.us / steps
    flops = of_call.flops * calls
    product = work(group.op)
    computes = product is not None and bool(product.flops) and calibration is not None
    highest = ceiling(group.op, group.kernels, flops / us * 1e6, calibration) if computes and calibration else None
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


def counted(op: Op) -> Work | None:
    """The work of a call; operators of `ONE_EACH` count one operation for each element."""
    found = work(op)
    if found is None or found.flops or not ONE_EACH.fullmatch(op.name):
        return found
    elements = max((prod(shape) for _, shape in (*found.read, *found.written)), default=0)
    return replace(found, flops=float(elements), formula=f"1·{elements}")


def delegating(trace: Trace) -> set[int]:
    """Operators that delegate all of their work to a callee: on a host, all of the time is the callee's."""
    moved = [found.bytes if (found := work(op)) is not None else 0.0 for op in trace.ops]
    return {
        op.parent
        for index, op in enumerate(trace.ops)
        if op.parent >= 0 and moved[op.parent] and moved[index] >= 0.9 * moved[op.parent]
    } - repeated(trace)


def ahead(trace: Trace) -> Ahead | None:
    """µs from the call of a launch to the start of its kernel or copy; None where graphs launch all kernels."""
    gaps = [k.start - k.launch.start for k in trace.kernels if k.launch is not None and not k.in_graph]
    gaps += [c.start - c.launch.start for c in trace.copies if c.launch is not None]
    return Ahead(median(gaps), max(gaps), len(gaps)) if gaps else None
