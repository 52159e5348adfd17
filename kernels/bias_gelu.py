"""gelu(x + bias) in one pass, after a GEMM without bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from optexp.kernelkit.elementwise import begin, from_last, over_columns, over_tiles, place, share, tile, wide
from optexp.kernelkit.kernel import (
    REFUSED,
    Case,
    Kernel,
    ceil_div,
    check_row,
    check_tensors,
    derived,
    is_small_with_row,
    is_transformed,
    operation,
    pays,
)
from optexp.kernelkit.launching import launch
from optexp.kernels.gelu import cdf, check_form, derivative

gelu_: Callable[..., Tensor] = torch._C._nn.gelu_  # type: ignore[attr-defined]  # from where F has `gelu`

OPERATIONS = 1.5  # forward is worth torch's two, its gradient one


@triton.jit
def bias_gelu_forward(
    x_ptr, bias_ptr, y_ptr, rows, columns,
    TANH: tl.constexpr, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    number, block = place(columns, WHOLE, BLOCK)
    start, offsets, mask, column = tile(tl.cast(number, tl.int64) * ROWS, block, rows, columns, ROWS, BLOCK)
    z = wide(tl.load(x_ptr + start + offsets, mask=mask)) + wide(tl.load(bias_ptr + column, mask=column < columns))
    tl.store(y_ptr + start + offsets, (z * cdf(z, TANH)).to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def bias_gelu_backward(
    dy_ptr, x_ptr, bias_ptr, dx_ptr, sums_ptr, rows, columns,
    TANH: tl.constexpr, WIDE: tl.constexpr, ALONE: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx, and for each group of rows the sum of what arrives at the bias (None: it is in x already).

    A tall tile is a lone program's only one, and brings its part of the bias: read earlier, that would hold it up.
    """
    begin(PDL, LETS_NEXT=ALONE and STAGES == 1, LETS_SUMS=not ALONE)
    tall: tl.constexpr = ALONE and ROWS >= 32
    block, group, count = share(columns, ALONE, BLOCK)
    column = block * BLOCK + tl.arange(0, BLOCK)
    bias = tl.zeros([BLOCK], WIDE)
    if bias_ptr is not None and not tall:
        bias = tl.load(bias_ptr + column, mask=column < columns).to(WIDE)
    sums = tl.zeros([BLOCK], WIDE)
    for number in tl.range(group, (rows - 1) // ROWS + 1, count, num_stages=STAGES):
        first = from_last(number, rows, ROWS)
        start, offsets, mask, _ = tile(first, block, rows, columns, ROWS, BLOCK)
        z = tl.load(x_ptr + start + offsets, mask=mask).to(WIDE)
        dy = tl.load(dy_ptr + start + offsets, mask=mask, other=0.0).to(WIDE)
        if bias_ptr is not None and tall:
            tl.debug_barrier()  # else ptxas computes with x, and then loads dy: two latencies, one after the other
            bias = tl.load(bias_ptr + column, mask=column < columns).to(WIDE)
        z += bias[None, :]
        dx = dy * derivative(z, TANH)
        tl.store(dx_ptr + start + offsets, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        sums += tl.sum(tl.where(mask, dx, 0.0), axis=0)
    tl.store(sums_ptr + group * columns + column, sums.to(sums_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def bias_gelu_plain(x_ptr, bias_ptr, y_ptr, size, columns, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    z = x + tl.load(bias_ptr + offsets % columns, mask=mask).to(tl.float32)
    u = 0.7978845608028654 * (z + 0.044715 * z * z * z)
    tanh = 2.0 / (1.0 + tl.exp(-2.0 * u)) - 1.0
    tl.store(y_ptr + offsets, 0.5 * z * (1.0 + tanh), mask=mask)


def _forward(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    y = _fake(x, bias, approximate)
    return over_tiles(bias_gelu_forward, y, x.contiguous(), bias.contiguous(), TANH=approximate == "tanh")


def _fake(x: Tensor, bias: Tensor, approximate: str) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, bias.dtype))


def _backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias."""
    operands, tanh = (dy.contiguous(), x.contiguous(), bias.contiguous()), approximate == "tanh"
    return over_columns(bias_gelu_backward, x.new_empty(x.shape), bias.dtype, *operands, TANH=tanh)


def _fake_backward(dy: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), bias.new_empty(bias.shape)


def _derived(dy: Tensor, x: Tensor, bias: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return derived(lambda x, bias: reference(x, bias, approximate), [x, bias], dy)  # type: ignore[return-value]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, str], output: Tensor) -> None:
    x, bias, ctx.approximate = inputs
    ctx.save_for_backward(x, bias)


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    x, bias = ctx.saved_tensors
    return *_bias_gelu_backward(dy, x, bias, ctx.approximate), None


_bias_gelu_backward = operation("bias_gelu_backward", _backward, _fake_backward, reference=_derived)
_bias_gelu = operation("bias_gelu", _forward, _fake, _save, _differentiate)


def bias_gelu(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    """gelu(x + bias).

    x:            … × n
    bias:         n
    approximate:  "none" (with erf) or "tanh"

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; the message has the remedy.
    """
    if is_small_with_row(x, bias, OPERATIONS):
        try:
            z = x + bias
            if torch.is_grad_enabled() or is_transformed():  # vmap would call `gelu_` once for each of many
                return F.gelu(z, approximate=approximate)
            return gelu_(z, approximate=approximate)
        except REFUSED:
            pass  # the checks below name the reason
    check_tensors("bias_gelu", x, bias)
    check_row("bias_gelu", x, "bias", bias)
    check_form("bias_gelu", approximate)
    return _bias_gelu(x, bias, approximate) if pays(x, OPERATIONS) else reference(x, bias, approximate)


def reference(x: Tensor, bias: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x + bias, approximate=approximate)


def plain(x: Tensor, bias: Tensor, approximate: str = "tanh") -> Tensor:
    """The textbook kernel in the tanh form, of contiguous tensors."""
    y = torch.empty_like(x)
    launch(bias_gelu_plain, ceil_div(x.numel(), 1024), x, bias, y, x.numel(), x.shape[-1], BLOCK=1024)
    return y


class BiasGELU(nn.Module):
    """GELU of x + bias; the bias is a parameter, initially zero. `approximate` is "none" (with erf) or "tanh"."""

    def __init__(self, features: int, approximate: str = "none", **options: Any) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, **options))
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return bias_gelu(x, self.bias, self.approximate)


KERNEL = Kernel(
    function=bias_gelu,
    reference=reference,
    plain=plain,
    cases=[
        Case("tanh", lambda fill: (fill(11, 1711), fill(1711), "tanh")),
        Case("exact", lambda fill: (fill(11, 1711), fill(1711), "none")),
        Case("one row", lambda fill: (fill(1024), fill(1024), "tanh")),
        Case("narrow", lambda fill: (fill(9, 101, 5), fill(5), "tanh")),
        Case("two dtypes", lambda fill: (fill(5, 64), fill(64).float(), "none")),
    ],
    large=Case("large", lambda fill: (fill(2**21 + 1, 1025), fill(1025), "tanh")),
    invalid_cases=[
        Case("a bias of another size", lambda fill: (fill(4, 3), fill(4))),
        Case("another form", lambda fill: (fill(4, 3), fill(3), "sigmoid")),
        Case("integers", lambda fill: (fill(4, 3).int(), fill(3))),
    ],
    benchmarks=[
        Case("16384×8192", lambda fill: (fill(16384, 8192), fill(8192), "tanh")),
        Case("128×1024", lambda fill: (fill(128, 1024), fill(1024), "tanh")),
    ],
    sweep=lambda fill, size: (fill(max(size // 1024, 1), 1024), fill(1024), "tanh"),
    patterns=[lambda x, bias, approximate: F.gelu(x + bias, approximate=approximate)],
    worthwhile=lambda x, *_: pays(x, OPERATIONS),
)
