"""The work of a step as a list: kernels grouped by the operator that launched them, in the order in which they ran."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from optexp.profiling.accounts import named_kernels
from optexp.profiling.work import size, work
from optexp.trace import Kernel, Op, Trace

Configuration = tuple[str, tuple[int, ...], tuple[int, ...]]  # a kernel's name, grid and block


@dataclass(frozen=True)
class Piece:
    """Kernels of one operator, or one kernel whose operator is not known; over all steps.

    account: name of the kind of work (see `optexp.profiling.accounts`)
    us:      of the device
    read, written: bytes; of one tensor each, the largest that is read and the one that is written
    bytes, flops: in all; 0 where the trace does not tell
    shapes:  of the operator's tensors
    """

    account: str
    name: str
    us: float
    kernels: tuple[str, ...]
    dtype: str = ""
    read: float = 0.0
    written: float = 0.0
    bytes: float = 0.0
    flops: float = 0.0
    shapes: tuple[tuple[int, ...], ...] = ()


def pieces(trace: Trace, beside: Trace | None = None) -> list[Piece]:
    """beside: the same work launched kernel by kernel, whose operators stand for those of kernels in a graph"""
    known = alone_in_their_operator(beside.kernels) if beside is not None else {}
    groups: dict[object, list[tuple[str, Kernel]]] = {}
    for index, (account, kernel) in enumerate(named_kernels(trace, beside)):
        alone = kernel.in_graph or kernel.op is None or kernel.op.id is None
        key = ("kernel", index) if alone else kernel.op and kernel.op.id
        groups.setdefault(key, []).append((account, kernel))
    found = []
    for group in groups.values():
        account, first = group[0]
        op = known.get(first.configuration) if first.in_graph else first.op
        found.append((first.start, _piece(account, op, [kernel for _, kernel in group])))
    return [piece for _, piece in sorted(found, key=lambda pair: pair[0])]


def alone_in_their_operator(kernels: Sequence[Kernel]) -> dict[Configuration, Op]:
    """Operators that launched one kernel, whose work is that kernel's."""
    launched = Counter(kernel.op.id for kernel in kernels if kernel.op is not None)
    return {k.configuration: k.op for k in kernels if k.op is not None and launched[k.op.id] == 1}


def _piece(account: str, op: Op | None, kernels: Sequence[Kernel]) -> Piece:
    us, names = sum(kernel.duration for kernel in kernels), tuple(kernel.name for kernel in kernels)
    if op is None:
        return Piece(account, "", us, names)
    dtype = op.inputs[0][0] if op.inputs else ""
    shapes = tuple(shape for _, shape in op.inputs)
    told = work(op)
    if told is None:
        return Piece(account, op.name, us, names, dtype, shapes=shapes)
    read, written = (max((size(*tensor) for tensor in some), default=0.0) for some in (told.read, told.written))
    return Piece(account, op.name, us, names, dtype, read, written, told.bytes, told.flops, shapes)
