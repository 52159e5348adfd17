"""Attention written out by a program: a GEMM, a softmax over its result, and a second GEMM."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from optexp.profiling.intervals import Union
from optexp.trace import Op, Trace

PRODUCT = "aten::bmm"
NEAR = 400  # most operators between a softmax and its GEMMs: masks, scales, dropout and operators that these call


def by_hand(trace: Trace) -> Union:
    """Host time of each attention written out, from the start of its first GEMM to the end of its second.

    Shapes identify the GEMMs: a softmax of [..., n, m] reads the result of a GEMM of [b, n, k] and [b, k, m], and a
    GEMM of [b, n, m] and [b, m, k] reads the result of the softmax.
    """
    spans = []
    for index, op in enumerate(trace.ops):
        shape = _shape(op, 0) if op.name == "aten::_softmax" else ()
        if len(shape) < 3:
            continue
        before = _product(trace.ops[max(index - NEAR, 0) : index][::-1], shape, written=True)
        after = _product(trace.ops[index + 1 : index + 1 + NEAR], shape, written=False)
        if before is not None and after is not None:
            spans.append((before.start, after.end))
    return Union(spans)


def kernel_us(trace: Trace, spans: Union) -> float:
    """µs per step in which kernels ran that operators inside the spans launched."""
    inside = (k for k in trace.kernels if k.op is not None and spans.holds((k.op.start + k.op.end) / 2))
    busy = Union(kernel.interval for kernel in inside)
    return busy.total / len(trace.steps)


def _product(near: Sequence[Op], shape: tuple[int, ...], written: bool) -> Op | None:
    """The nearest GEMM whose result (`written`), or else whose first operand, has this shape."""
    batch, (rows, columns) = prod(shape[:-2]), shape[-2:]
    for op in near:
        if op.name == PRODUCT:
            left, right = _shape(op, 0), _shape(op, 1)
            if not left or not right:
                continue
            matrix = (left[-2], right[-1]) if written else (left[-2], left[-1])
            if matrix == (rows, columns) and prod(left[:-2]) == batch:
                return op
    return None


def _shape(op: Op, index: int) -> tuple[int, ...]:
    """The shape of an input with at least two dimensions; () without such an input."""
    shape = tuple(op.inputs[index][1]) if len(op.inputs) > index else ()
    return shape if len(shape) >= 2 else ()
