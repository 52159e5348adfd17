"""The work of a step as a list: kernels grouped by the operator that launched them, in the order in which they ran."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from optexp.profiling.accounts import named_kernels
from optexp.profiling.work import size, work
from optexp.trace import Kernel, Op, Trace

Configuration = tuple[str, tuple[int, ...], tuple[int, ...]]  # a kernel's name, grid and block


@dataclass(frozen=True)
class Piece:
    """All kernels of one call of an operator, or one kernel without a known operator.

    step:    index of the step that launched them
    account: name of the kind of work (see `optexp.profiling.accounts`) of its longest kernel
    name:    of the operator; empty where unknown
    us:      device time; longest: µs of the longest kernel
    kernels: names
    dtype:   of the operator's first floating-point tensor
    read, written: bytes of the largest tensor that is read, and of the largest that is written
    bytes, flops: totals; 0 where the trace does not show them
    shapes:  of the operator's tensors
    """

    step: int
    account: str
    name: str
    us: float
    longest: float
    kernels: tuple[str, ...]
    dtype: str = ""
    read: float = 0.0
    written: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    shapes: tuple[tuple[int, ...], ...] = ()


def pieces(trace: Trace, beside: Trace | None = None) -> list[Piece]:
    """Pieces of all steps.  beside: a trace without a graph; it names the operators of kernels that a graph launches"""
    known = alone_in_their_operator(beside.kernels) if beside is not None else {}
    starts = [step.start for step in trace.steps]
    groups: dict[object, list[tuple[str, Kernel]]] = {}
    for index, (account, kernel) in enumerate(named_kernels(trace, beside)):
        alone = kernel.in_graph or kernel.op is None or kernel.op.id is None
        key = ("kernel", index) if alone else kernel.op and kernel.op.id
        groups.setdefault(key, []).append((account, kernel))
    found = []
    for group in groups.values():
        first = group[0][1]
        account, _ = max(group, key=lambda entry: entry[1].duration)  # cuBLAS may scale or split around its GEMM
        op = known.get(first.configuration) if first.in_graph else first.op
        step = bisect_right(starts, (first.launch or first).start) - 1
        found.append((step, first.start, _piece(step, account, op, [kernel for _, kernel in group])))
    return [piece for _, _, piece in sorted(found, key=lambda entry: entry[:2])]


def alone_in_their_operator(kernels: Sequence[Kernel]) -> dict[Configuration, Op]:
    """Operators that launched a single kernel, by that kernel's configuration."""
    launched = Counter(kernel.op.id for kernel in kernels if kernel.op is not None)
    return {k.configuration: k.op for k in kernels if k.op is not None and launched[k.op.id] == 1}


def _piece(step: int, account: str, op: Op | None, kernels: Sequence[Kernel]) -> Piece:
    us, longest = sum(kernel.duration for kernel in kernels), max(kernel.duration for kernel in kernels)
    launched = Piece(step, account, "", us, longest, tuple(kernel.name for kernel in kernels))
    if op is None:
        return launched
    dtype = next((dtype for dtype, _ in op.inputs if "float" in dtype), "")
    known = replace(launched, name=op.name, dtype=dtype, shapes=tuple(shape for _, shape in op.inputs))
    moved = work(op)
    if moved is None:
        return known
    read, written = (max((size(*tensor) for tensor in some), default=0) for some in (moved.read, moved.written))
    return replace(known, read=read, written=written, bytes=moved.bytes, flops=moved.flops)
