"""Attention that a program computes itself: a product, a softmax over its result, and a product with that."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from optexp.profiling.intervals import Union
from optexp.trace import Op, Trace

PRODUCT = "aten::bmm"
NEAR = 400  # operators between a softmax and its products, at most: masks, scales, dropout and what they call


def by_hand(trace: Trace) -> Union:
    """When attention was asked for by hand, from the start of its first product to the end of its last.

    The products are told by their shapes: the softmax of [..., n, m] reads what a product of [b, n, k] and [b, k, m]
    has written, and a product of [b, n, m] and [b, m, k] reads what it writes.
    """
    found = []
    for index, op in enumerate(trace.ops):
        shape = _shape(op, 0) if op.name == "aten::_softmax" else ()
        if len(shape) < 3:
            continue
        before = _product(trace.ops[max(index - NEAR, 0) : index][::-1], shape, written=True)
        after = _product(trace.ops[index + 1 : index + 1 + NEAR], shape, written=False)
        if before is not None and after is not None:
            found.append((before.start, after.end))
    return Union(found)


def kernel_us(trace: Trace, spans: Union) -> float:
    """µs of a step with kernels of operators inside the spans."""
    inside = (k for k in trace.kernels if k.op is not None and spans.holds((k.op.start + k.op.end) / 2))
    ours = Union(kernel.interval for kernel in inside)
    return ours.total / len(trace.steps)


def _product(near: Sequence[Op], shape: tuple[int, ...], written: bool) -> Op | None:
    """The nearest product that writes, or first reads, a matrix of this shape in each batch."""
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
    """Of an input with two dimensions at least; () without one."""
    shape = tuple(op.inputs[index][1]) if len(op.inputs) > index else ()
    return shape if len(shape) >= 2 else ()
