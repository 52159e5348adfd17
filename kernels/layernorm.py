"""LayerNorm with one read of a row: mean and variance of what registers hold, and both gradients of a row at once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from optexp.kernelkit.elementwise import FEW, begin, left, matrix, wide
from optexp.kernelkit.kernel import (
    REFUSED,
    Case,
    Kernel,
    check_tensors,
    contiguous,
    derived,
    is_differentiated,
    is_small,
    operation,
    pays,
    power_of_two,
)
from optexp.kernelkit.launching import launch
from optexp.kernelkit.rows import Launch, in_rows
from optexp.kernels._layernorm_gradients import backward_of_rows, fake_gradients

LONGEST = 16384  # columns whose two gradient sums fit in registers beside the row; longer rows are torch's business


@triton.jit
def layernorm_forward(
    x_ptr, weight_ptr, bias_ptr, mean_ptr, scale_ptr, y_ptr, rows, columns, eps: tl.float64,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of ROWS whole rows. The variance is that of the differences from the mean: a large mean costs nothing.

    A program that loops keeps weight and bias; one that does not loads them when registers are free again, or at once
    (without stages). Then there is no loop: what is made of them in front of one would hold up x until they are there.
    """
    begin(PDL, LETS_NEXT=STAGES <= 1)
    column = tl.arange(0, BLOCK)[None, :]
    weight = 0.0
    bias = 0.0
    if weight_ptr is not None and STAGES != 1:
        weight = tl.load(weight_ptr + column, mask=column < columns)
    if bias_ptr is not None and STAGES != 1:
        bias = tl.load(bias_ptr + column, mask=column < columns)
    if STAGES == 0:
        _tile(x_ptr, weight_ptr, bias_ptr, mean_ptr, scale_ptr, y_ptr, tl.program_id(0), rows, columns, eps,
              weight, bias, ROWS, BLOCK, False)  # fmt: skip
    else:
        for tile in tl.range(tl.program_id(0), (rows - 1) // ROWS + 1, tl.num_programs(0), num_stages=STAGES):
            _tile(x_ptr, weight_ptr, bias_ptr, mean_ptr, scale_ptr, y_ptr, tile, rows, columns, eps,
                  weight, bias, ROWS, BLOCK, STAGES == 1)  # fmt: skip


@triton.jit
def _tile(
    x_ptr, weight_ptr, bias_ptr, mean_ptr, scale_ptr, y_ptr, tile, rows, columns, eps, weight, bias,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, LATE: tl.constexpr,
):  # fmt: skip
    """One of them, with weight and bias as they were loaded, or, late, loaded when its rows are normal."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    first = tl.cast(tile, tl.int64) * ROWS
    start = first * columns
    exists = row < left(first, rows, ROWS)
    mask = (column < columns) & exists
    x = wide(tl.load(x_ptr + start + row * columns + column, mask=mask, other=0.0))
    mean = tl.sum(x, axis=1, keep_dims=True) / columns
    centred = tl.where(column < columns, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=1, keep_dims=True) / columns
    scale = 1.0 / tl.sqrt(variance + tl.cast(eps, x.dtype))
    if mean_ptr is not None:  # before y is made: then they need no registers any more
        tl.store(mean_ptr + first + row, mean, mask=exists)
        tl.store(scale_ptr + first + row, scale, mask=exists)
    y = centred * scale
    if weight_ptr is not None:
        if LATE:
            weight = tl.load(weight_ptr + column, mask=column < columns)
        y *= weight.to(y.dtype)
    if bias_ptr is not None:
        if LATE:
            bias = tl.load(bias_ptr + column, mask=column < columns)
        y += bias.to(y.dtype)
    tl.store(y_ptr + start + row * columns + column, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def layernorm_plain(x_ptr, weight_ptr, bias_ptr, y_ptr, columns, eps, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    mask = offsets < columns
    x = tl.load(x_ptr + tl.program_id(0) * columns + offsets, mask=mask, other=0.0).to(tl.float32)
    mean = tl.sum(x, axis=0) / columns
    centred = tl.where(mask, x - mean, 0.0)
    variance = tl.sum(centred * centred, axis=0) / columns
    y = centred / tl.sqrt(variance + eps)
    y = y * tl.load(weight_ptr + offsets, mask=mask) + tl.load(bias_ptr + offsets, mask=mask)
    tl.store(y_ptr + tl.program_id(0) * columns + offsets, y, mask=mask)


def forward_of_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, columns: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and mean and 1/deviation of every row.

    columns:  elements of a row
    dtype:    of the result
    """
    y, mean, scale = _fake(x, weight, bias, columns, eps, dtype)
    _normalise(x, weight, bias, mean, scale, y, columns, eps)
    return y, mean, scale


def normalised_rows(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, columns: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor]:
    """The result alone."""
    y = x.new_empty(x.shape, dtype=dtype)
    _normalise(x, weight, bias, None, None, y, columns, eps)
    return (y,)


def _normalise(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor | None, scale: Tensor | None,
    y: Tensor, columns: int, eps: float,
) -> None:  # fmt: skip
    operands = (contiguous(tensor) for tensor in (x, weight, bias))
    rows = x.numel() // columns
    one = [Launch(max(1, 1024 // max(power_of_two(columns), 16)), 4, 0, 0)] if rows <= FEW and columns <= 4096 else []
    in_rows(layernorm_forward, rows, columns, *operands, mean, scale, y, more=_more_configs, first=one, eps=eps)


@cache
def _more_configs(block: int) -> list[Launch]:
    """Statistics, weight and bias take registers: with a limit, as many programs run at once as without them."""
    if block <= 1024:
        one = 1024 // block
        at_once = [Launch(2 * one, 4, 0, 0), Launch(2 * one, 4, 0, 0, 40), Launch(4 * one, 4, 0, 0, 64)]
        return [Launch(4 * one, 4), *at_once, Launch(4 * one, 4, 5, 3)]
    limited = [Launch(1, 4, registers=128), Launch(1, 8, registers=64)] if block <= 8192 else []
    return [*limited, Launch(1, 16 if block <= 8192 else 32, 1, 3)]


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, columns: int, eps: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    rows, statistics = x.numel() // columns, torch.promote_types(x.dtype, torch.float32)
    mean = x.new_empty(rows, dtype=statistics)
    return x.new_empty(x.shape, dtype=dtype), mean, torch.empty_like(mean)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, weight, bias, ctx.columns, ctx.eps, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, *output[1:])


def _differentiate(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 6
    x, weight, bias, mean, scale = ctx.saved_tensors
    if is_differentiated(dy):  # and mean and scale depend on x

        def plainly(x: Tensor, *parameters: Tensor | None) -> Tensor:
            weight, bias = (None if p is None else p.flatten() for p in parameters)
            y = F.layer_norm(x.reshape(-1, ctx.columns), (ctx.columns,), weight, bias, ctx.eps)
            return y.view(x.shape).to(dy.dtype)

        return *derived(plainly, [x, weight, bias], dy), None, None, None
    dtype = None if bias is None else bias.dtype
    dx, dweight, dbias = layernorm_gradients(dy, x, weight, mean, scale, ctx.columns, dtype)
    both = (None if p is None else sums.view(p.shape) for p, sums in ((weight, dweight), (bias, dbias)))
    return dx, *both, None, None, None


layernorm_gradients = operation("layernorm_backward", backward_of_rows, fake_gradients)
_layernorm = operation("layernorm", forward_of_rows, _fake, _save, _differentiate, inference=normalised_rows)


def layernorm(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.layer_norm(x, normalized_shape, weight, bias, eps), over the last dimensions.

    Under autocast on a GPU the result is float32, as torch's.

    x:             … × normalized_shape
    weight, bias:  of normalized_shape, or None

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; the message has the remedy.
    """
    if is_small(x):
        try:
            return torch.layer_norm(x, as_shape(normalized_shape), weight, bias, eps)  # without what F does in Python
        except REFUSED:
            pass  # the checks below name the reason
    columns = check_norm("layernorm", x, normalized_shape, weight, bias)
    if not (pays(x) and 0 < columns <= LONGEST):
        return reference(x, normalized_shape, weight, bias, eps)
    widened = x.is_cuda and torch.is_autocast_enabled("cuda") and x.dtype != torch.float64
    y: Tensor = _layernorm(x, weight, bias, columns, float(eps), torch.float32 if widened else x.dtype)[0]
    return y


def worthwhile(x: Tensor, normalized_shape: int | Sequence[int], *_: Any) -> bool:
    """True where the kernel can beat torch; arguments, fake tensors included, as of `layernorm`."""
    return pays(x) and 0 < math.prod(as_shape(normalized_shape)) <= LONGEST


def as_shape(normalized_shape: int | Sequence[int]) -> tuple[int, ...]:
    """One number stands for one dimension, as nn.LayerNorm takes it."""
    return (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)


def check_norm(
    name: str, x: Tensor, normalized_shape: int | Sequence[int], weight: Tensor | None, bias: Tensor | None
) -> int:
    """The number of elements that are normalised together.

    Raises:
        ValueError: The shapes do not fit.
    """
    check_tensors(name, x, weight, bias)
    shape = as_shape(normalized_shape)
    if not shape or x.shape[-len(shape) :] != shape:
        raise ValueError(f"{name}: an input of shape {list(x.shape)} does not end in the given shape {list(shape)}")
    if weight is not None and weight.shape != shape:
        raise ValueError(f"{name}: the weight has shape {list(weight.shape)}, and must have {list(shape)}")
    if bias is not None and bias.shape != shape:
        raise ValueError(f"{name}: the bias has shape {list(bias.shape)}, and must have {list(shape)}")
    return math.prod(shape)


def reference(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return F.layer_norm(x, as_shape(normalized_shape), weight, bias, eps)


def plain(x: Tensor, normalized_shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """The textbook kernel, of a contiguous matrix along its rows."""
    y, (rows, columns) = torch.empty_like(x), matrix(x)
    launch(layernorm_plain, rows, x, weight, bias, y, columns, eps, BLOCK=power_of_two(columns))
    return y


class LayerNorm(nn.LayerNorm):
    """nn.LayerNorm by our kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return layernorm(x, self.normalized_shape, self.weight, self.bias, self.eps)


KERNEL = Kernel(
    function=layernorm,
    reference=reference,
    plain=plain,
    cases=[
        Case("rows", lambda fill: (fill(19, 333), (333,), fill(333), fill(333))),
        Case("no parameters", lambda fill: (fill(5, 1024), (1024,))),
        Case("no bias", lambda fill: (fill(3, 50, 7), (7,), fill(7))),
        Case("two dimensions", lambda fill: (fill(3, 5, 7), (5, 7), fill(5, 7), fill(5, 7))),
        Case("one wide row", lambda fill: (fill(1, 3000), (3000,), fill(3000), fill(3000), 1e-3)),
        Case("a number for a shape", lambda fill: (fill(3, 50), 50, fill(50), fill(50), 1)),
        Case("of nothing", lambda fill: (fill(4, 0), (0,), fill(0), fill(0))),
        Case("a large mean", lambda fill: (fill(9, 200) + 40, (200,), fill(200), fill(200))),
    ],
    large=Case("large", lambda fill: (fill(2**21 + 1, 1025), (1025,), fill(1025), fill(1025))),
    invalid_cases=[
        Case("another shape", lambda fill: (fill(4, 3), (4,))),
        Case("no shape", lambda fill: (fill(4, 3), ())),
        Case("a weight of another size", lambda fill: (fill(4, 3), (3,), fill(4))),
        Case("integers", lambda fill: (fill(4, 3).int(), (3,))),
    ],
    benchmarks=[
        Case("16384×1024", lambda fill: (fill(16384, 1024), (1024,), fill(1024), fill(1024)), goal=1.05),
        Case("16384×8192", lambda fill: (fill(16384, 8192), (8192,), fill(8192), fill(8192))),
        Case("128×1024", lambda fill: (fill(128, 1024), (1024,), fill(1024), fill(1024))),
    ],
    sweep=lambda fill, size: (fill(max(size // 1024, 1), 1024), (1024,), fill(1024), fill(1024)),
    patterns=[
        lambda x, normalized_shape, weight, bias, eps: F.layer_norm(x, normalized_shape, weight, bias, eps),
    ],
    worthwhile=worthwhile,
)
