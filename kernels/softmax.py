"""Softmax with one read of a row: it stays in registers between the maximum, the sum and the quotient.

A row that is too long for registers is read twice, the second time mostly from L2.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from optexp.kernelkit.elementwise import FEW, begin, exp, from_last, left, matrix, wide
from optexp.kernelkit.kernel import (
    REFUSED,
    SUPPORTED,
    Case,
    Kernel,
    check_tensors,
    is_small,
    operation,
    pays,
    power_of_two,
)
from optexp.kernelkit.launching import launch
from optexp.kernelkit.rows import LONGEST, Launch, in_rows
from optexp.kernelkit.tuning import bucket, fastest

LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
LOWEST_DOUBLE = tl.constexpr(torch.finfo(torch.float64).min)


@triton.jit
def softmax_forward(
    x_ptr, y_ptr, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr
):
    """Tiles of ROWS whole rows. Without stages a row is read three times, from L1 where it fits, and never all of it
    is held in float32: then two programs share a multiprocessor.
    """
    begin(PDL, LETS_NEXT=STAGES <= 1)
    ahead: tl.constexpr = STAGES if STAGES > 0 else 1
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    for tile in tl.range(tl.program_id(0), (rows - 1) // ROWS + 1, tl.num_programs(0), num_stages=ahead):
        first = tl.cast(tile, tl.int64) * ROWS
        start = first * columns
        mask = column < columns
        if ROWS > 1:  # a lone row exists: one condition less to keep, bit by bit, for every row on its way
            mask = mask & (row < left(first, rows, ROWS))
        here, nothing = x_ptr + start + row * columns + column, float("-inf")
        if STAGES == 0:  # loads of the same kind would be made one
            x = wide(tl.load(here, mask=mask, other=nothing, eviction_policy="evict_last"))
        else:
            x = wide(tl.load(here, mask=mask, other=nothing))
        top = tl.max(x, axis=1, keep_dims=True)
        if STAGES == 0:
            x = wide(tl.load(here, mask=mask, other=nothing))
        scale = 1.0 / tl.sum(exp(x - top), axis=1, keep_dims=True)
        if STAGES == 0:
            x = wide(tl.load(here, mask=mask, other=nothing, eviction_policy="evict_first"))
        y = exp(x - top) * scale
        tl.store(y_ptr + start + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_backward(
    dy_ptr, y_ptr, dx_ptr, rows, columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx = y·(dy − Σ y·dy). Without stages dy is read twice, the second time from L2, and only y is held."""
    begin(PDL, LETS_NEXT=STAGES <= 1)
    ahead: tl.constexpr = STAGES if STAGES > 0 else 1
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    for tile in tl.range(tl.program_id(0), (rows - 1) // ROWS + 1, tl.num_programs(0), num_stages=ahead):
        first = from_last(tile, rows, ROWS)
        start = first * columns
        exists = row < left(first, rows, ROWS)
        mask = (column < columns) & exists
        y = wide(tl.load(y_ptr + start + row * columns + column, mask=mask, other=0.0))
        there = dy_ptr + start + row * columns + column
        if STAGES == 0:  # loads of the same kind would be made one
            dy = wide(tl.load(there, mask=mask, other=0.0, eviction_policy="evict_last"))
        else:
            dy = wide(tl.load(there, mask=mask, other=0.0))
        total = tl.sum(y * dy, axis=1, keep_dims=True)
        if STAGES == 0:
            dy = wide(tl.load(there, mask=mask, other=0.0, eviction_policy="evict_first"))
        dx = y * (dy - total)
        tl.store(dx_ptr + start + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_long_forward(x_ptr, y_ptr, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row a program, in blocks: maximum and sum in one pass, the sum rescaled whenever the maximum grows."""
    begin(PDL)
    x_ptr += tl.program_id(0).to(tl.int64) * columns
    y_ptr += tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, BLOCK)
    sums = wide(tl.zeros([BLOCK], x_ptr.dtype.element_ty))
    # Finite, so that a block of −inf adds nothing and a row of it is 0/0; and above no number that x may hold.
    top = tl.full([], LOWEST_DOUBLE if sums.dtype == tl.float64 else LOWEST, sums.dtype)
    for start in range(0, tl.cast(columns, tl.int64), BLOCK):
        x = wide(tl.load(x_ptr + start + offsets, mask=offsets < columns - start, other=float("-inf")))
        higher = tl.maximum(top, tl.max(x, axis=0))
        sums = sums * exp(top - higher) + exp(x - higher)
        top = higher
    scale = 1.0 / tl.sum(sums, axis=0)
    for start in range(0, tl.cast(columns, tl.int64), BLOCK):
        x = wide(tl.load(x_ptr + start + offsets, mask=offsets < columns - start))
        y = exp(x - top) * scale
        tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=offsets < columns - start)


@triton.jit
def softmax_long_backward(dy_ptr, y_ptr, dx_ptr, columns, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """One row a program, in blocks."""
    begin(PDL)
    dy_ptr += tl.program_id(0).to(tl.int64) * columns
    y_ptr += tl.program_id(0).to(tl.int64) * columns
    dx_ptr += tl.program_id(0).to(tl.int64) * columns
    offsets = tl.arange(0, BLOCK)
    sums = wide(tl.zeros([BLOCK], y_ptr.dtype.element_ty))
    for start in range(0, tl.cast(columns, tl.int64), BLOCK):
        mask = offsets < columns - start
        y = wide(tl.load(y_ptr + start + offsets, mask=mask, other=0.0))
        sums += y * wide(tl.load(dy_ptr + start + offsets, mask=mask, other=0.0))
    total = tl.sum(sums, axis=0)
    for start in range(0, tl.cast(columns, tl.int64), BLOCK):
        mask = offsets < columns - start
        y = wide(tl.load(y_ptr + start + offsets, mask=mask))
        dx = y * (wide(tl.load(dy_ptr + start + offsets, mask=mask)) - total)
        tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)


@triton.jit
def softmax_plain(x_ptr, y_ptr, columns, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + tl.program_id(0) * columns + offsets, mask=mask, other=float("-inf")).to(tl.float32)
    e = tl.exp(x - tl.max(x, axis=0))
    tl.store(y_ptr + tl.program_id(0) * columns + offsets, e / tl.sum(e, axis=0), mask=mask)


@cache
def _read_again(block: int) -> list[Launch]:
    """Forward in half precision: two programs a multiprocessor where a row in registers leaves room for one."""
    return [Launch(1, 16, 0, 0, 64), Launch(1, 32, 0, 0, 32)] if block > 8192 else []


@cache
def _half_held(block: int) -> list[Launch]:
    """Backward: two rows in registers would leave room for nothing."""
    return [Launch(1, 32, 0, 0, 64), Launch(1, 16, 0, 0, 128)] if block > 8192 else []


def _in_rows(kernel: Any, long: Any, library: Callable[[], Tensor], dtype: torch.dtype, *operands: Tensor) -> Tensor:
    """The result, tile by tile of whole rows; where a row is too long, block by block or by the library."""
    rows, columns = matrix(operands[0])
    if columns <= LONGEST:
        result = torch.empty_like(operands[0], dtype=dtype)
        half = operands[0].element_size() == 2
        more = _half_held if kernel is softmax_backward else _read_again if half else None
        one = [Launch(1, 4)] if rows <= FEW and 512 < columns <= 1024 else []  # several rows leave processors idle
        in_rows(kernel, rows, columns, *operands, result, more=more, first=one)
        return result

    def run(config: str) -> Tensor:
        if config == "library":
            return library()
        result = torch.empty_like(operands[0], dtype=dtype)
        launch(long, rows, *operands, result, columns, BLOCK=4096, num_warps=8)
        return result

    key = (*(operand.dtype for operand in operands), dtype, columns, bucket(rows))
    return run(fastest(long.__name__, key, ["ours", "library"], run, operands[0].device))


def _forward(x: Tensor, dtype: torch.dtype) -> Tensor:
    def library() -> Tensor:
        return torch.softmax(x, -1, dtype)

    return _in_rows(softmax_forward, softmax_long_forward, library, dtype, x.contiguous())


def _backward(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return _in_rows(
        softmax_backward, softmax_long_backward, lambda: _derived(dy, y, dtype), dtype, dy.contiguous(), y.contiguous()
    )


def _derived(dy: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    return torch._softmax_backward_data(dy, y, -1, y.dtype).to(dtype)


def _save(ctx: Any, inputs: tuple[Tensor, torch.dtype], output: Tensor) -> None:
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(output)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
    return _softmax_backward(dy, *ctx.saved_tensors, ctx.dtype), None


_softmax_backward = operation(
    "softmax_backward",
    _backward,
    fake=lambda dy, y, dtype: y.new_empty(y.shape, dtype=dtype),
    reference=_derived,
)
_softmax = operation("softmax", _forward, lambda x, dtype: x.new_empty(x.shape, dtype=dtype), _save, _differentiate)


def softmax(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    """torch.softmax(x, dim, dtype).

    Under autocast on a GPU the result is float32, as torch's. Dimensions other than the last go to torch.

    dtype:  of the result; None: that of x

    Raises:
        ValueError: `dim` or `dtype` is out of range, or x has an unsupported dtype.
    """
    if is_small(x):
        try:
            return torch.softmax(x, dim, dtype)
        except REFUSED:
            pass  # the checks below name the reason
    check_tensors("softmax", x)
    last = max(x.dim() - 1, 0)
    if not -last - 1 <= dim <= last:
        raise ValueError(f"softmax: dim is {dim}, and an input of shape {list(x.shape)} has {x.dim()} dimensions")
    if dtype is not None and dtype not in SUPPORTED:
        raise ValueError(f"softmax: dtype is {dtype}, and must be one of {', '.join(map(str, SUPPORTED))}")
    if not pays(x) or dim not in (-1, last) or not x.dim():
        return reference(x, dim, dtype)
    widened = x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
    return _softmax(x, dtype or (torch.float32 if widened else x.dtype))


def reference(x: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> Tensor:
    return torch.softmax(x, dim, dtype)


def plain(x: Tensor, dim: int = -1) -> Tensor:
    """The textbook kernel, of a contiguous matrix along its rows."""
    y = torch.empty_like(x)
    launch(softmax_plain, x.shape[0], x, y, x.shape[1], BLOCK=power_of_two(x.shape[1]))
    return y


class Softmax(nn.Softmax):
    """nn.Softmax by our kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return softmax(x, -1 if self.dim is None else self.dim)


def _masked(x: Tensor) -> Tensor:
    """Its first row as attention masks one."""
    x[0] = torch.finfo(x.dtype).min
    return x


KERNEL = Kernel(
    function=softmax,
    reference=reference,
    plain=plain,
    cases=[
        Case("rows", lambda fill: (fill(19, 333), -1)),
        Case("one row", lambda fill: (fill(1, 1024), -1)),
        Case("short rows", lambda fill: (fill(3, 50, 7), 2)),
        Case("wide rows", lambda fill: (fill(5, 3000), -1)),
        Case("rows too long for registers", lambda fill: (fill(2, 40000) * 3, -1)),
        Case("long rows that are masked", lambda fill: (_masked(fill(2, 40000)), -1)),
        Case("another dimension", lambda fill: (fill(6, 5, 4), 1)),
        Case("a number", lambda fill: (fill(1)[0], -1)),
    ],
    large=Case("large", lambda fill: (fill(2**21 + 1, 1025), -1)),
    invalid_cases=[
        Case("no such dimension", lambda fill: (fill(4, 4), 2)),
        Case("integers", lambda fill: (fill(4, 4).int(), -1)),
        Case("to integers", lambda fill: (fill(4, 4), -1, torch.int32)),
    ],
    benchmarks=[
        Case("16384×1024", lambda fill: (fill(16384, 1024), -1), goal=1.02),
        Case("16384×8192", lambda fill: (fill(16384, 8192), -1), goal=1.03),
        Case("4096×32768", lambda fill: (fill(4096, 32768), -1), goal=1.05),
        Case("1×1024", lambda fill: (fill(1, 1024), -1)),
        Case("128×1024", lambda fill: (fill(128, 1024), -1)),
    ],
    sweep=lambda fill, size: (fill(max(size // 1024, 1), 1024), -1),
    patterns=[lambda x, dim, dtype: torch.softmax(x, dim, dtype)],
    worthwhile=lambda x, dim, dtype: x.dim() > 0 and pays(x) and dim % x.dim() == x.dim() - 1,
)
