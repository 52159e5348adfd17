"""(relu(x) + bias)·scale in one pass: three operations that would each go through all of memory.

Backward needs one bit of each element of x: whether it passed. Of many elements forward saves these bits, and not x.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from optexp.kernelkit import extension
from optexp.kernelkit.bitmask import (
    given,
    has_many,
    load_tile_of_bits,
    rows_of_bits,
    store_tile_of_bits,
    unpacked,
    worth_bits,
)
from optexp.kernelkit.elementwise import begin, from_last, matrix, over_columns, over_tiles, place, share, tile, wide
from optexp.kernelkit.kernel import (
    REFUSED,
    Case,
    Kernel,
    ceil_div,
    check_row,
    check_tensors,
    derived,
    is_small_with_row,
    multiprocessors,
    operation,
    pays,
)
from optexp.kernelkit.launching import launch

SOURCE = extension.Source("relu_bias_scale")


@triton.jit
def relu_bias_scale_forward(
    x_ptr, bias_ptr, passed_ptr, y_ptr, rows, columns, scale: tl.float64,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    number, block = place(columns, WHOLE, BLOCK)
    first = tl.cast(number, tl.int64) * ROWS
    start, offsets, mask, column = tile(first, block, rows, columns, ROWS, BLOCK)
    bias = wide(tl.load(bias_ptr + column, mask=column < columns))
    x = wide(tl.load(x_ptr + start + offsets, mask=mask, other=0.0))  # so that all bits of a word are known
    stopped = x <= 0  # compared this way, NaN passes
    y = (tl.where(stopped, 0.0, x) + bias) * tl.cast(scale, bias.dtype)
    tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)
    if passed_ptr is not None:
        store_tile_of_bits(passed_ptr, first, block, rows, columns, stopped == 0, ROWS, BLOCK)


@triton.jit
def relu_bias_scale_backward(
    dy_ptr,
    saved_ptr,
    dx_ptr,
    sums_ptr,
    rows,
    columns,
    scale: tl.float64,
    WIDE: tl.constexpr,
    ALONE: tl.constexpr,
    STAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """dx, and for each group of rows the sum of what arrives at the bias.

    Saved is x, or one bit for each element: whether it passed.
    """
    bits: tl.constexpr = saved_ptr.dtype.element_ty == tl.int32
    begin(PDL, LETS_NEXT=ALONE and STAGES == 1, LETS_SUMS=not ALONE)
    block, group, count = share(columns, ALONE, BLOCK)
    sums = tl.zeros([BLOCK], WIDE)
    for number in tl.range(group, (rows - 1) // ROWS + 1, count, num_stages=STAGES):
        first = from_last(number, rows, ROWS)
        start, offsets, mask, column = tile(first, block, rows, columns, ROWS, BLOCK)
        if not bits:
            x = tl.load(saved_ptr + start + offsets, mask=mask).to(WIDE)
        dy = tl.load(dy_ptr + start + offsets, mask=mask, other=0.0).to(WIDE) * tl.cast(scale, WIDE)
        # Behind dy: bits are handed out to threads, by a barrier.
        passed = load_tile_of_bits(saved_ptr, first, block, rows, columns, ROWS, BLOCK) if bits else (x <= 0) == 0
        tl.store(dx_ptr + start + offsets, tl.where(passed, dy, 0.0).to(dx_ptr.dtype.element_ty), mask=mask)
        sums += tl.sum(dy, axis=0)
    column = block * BLOCK + tl.arange(0, BLOCK)
    tl.store(sums_ptr + group * columns + column, sums.to(sums_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def relu_bias_scale_plain(x_ptr, bias_ptr, y_ptr, size, columns, scale, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask)
    bias = tl.load(bias_ptr + offsets % columns, mask=mask)
    tl.store(y_ptr + offsets, (tl.maximum(x, 0.0) + bias) * scale, mask=mask)


def _forward(x: Tensor, bias: Tensor, scale: float, bits: bool) -> tuple[Tensor, Tensor]:
    """The result and, with `bits`, one bit for each element: whether it passed."""
    y, passed = fake_with_bits(x, bias, bits)
    operands = (x.contiguous(), bias.contiguous(), given(passed))
    return over_tiles(relu_bias_scale_forward, y, *operands, scale=scale), passed


def fake_with_bits(x: Tensor, bias: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return _fake(x, bias), rows_of_bits(x, rest[-1])


def _cuda_forward(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    y, (rows, columns) = x.new_empty(x.shape), matrix(x)
    if y.numel():
        sizes = (rows, columns, _groups(rows, columns, x))
        SOURCE.run("forward", x.contiguous(), bias.contiguous(), y, *sizes, scale, x.dtype)
    return y


def _cuda_backward(dy: Tensor, x: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    dx, (rows, columns) = x.new_empty(x.shape), matrix(x)
    groups = _groups(rows, columns, x)
    if not x.numel():
        return dx, x.new_zeros(columns, dtype=dtype)
    total = x.new_empty(columns)
    sums = total if groups == 1 else x.new_empty((groups, columns), dtype=torch.float32)
    operands = (dy.contiguous(), x.contiguous(), dx, sums, total, rows, columns, groups)
    SOURCE.run("backward", *operands, scale, x.dtype)
    return dx, total.to(dtype)


def _groups(rows: int, columns: int, x: Tensor) -> int:
    """Rows of blocks: enough that each multiprocessor gets eight, which fill it."""
    across = max(1, ceil_div(columns, 512 // x.element_size()))
    return max(1, min(8 * multiprocessors(x.device) // across, ceil_div(rows, 8)))


def _fake(x: Tensor, bias: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape, dtype=torch.promote_types(x.dtype, bias.dtype))


def _backward(dy: Tensor, saved: Tensor, scale: float, dtype: torch.dtype, bias: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias, in their dtypes; `saved` is x, or bits."""
    dx = dy.new_empty(dy.shape, dtype=dtype)
    return over_columns(relu_bias_scale_backward, dx, bias, dy.contiguous(), saved.contiguous(), scale=scale)


def fake_of_saved(dy: Tensor, saved: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    *_, dtype, bias = rest
    return dy.new_empty(dy.shape, dtype=dtype), dy.new_empty(dy.shape[-1], dtype=bias)


def _derived(dy: Tensor, saved: Tensor, scale: float, dtype: torch.dtype, bias: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients in plain PyTorch, for double backward."""
    return derived_backward(dy, x_of(saved, dy.shape[-1], dtype), scale, bias)


def x_of(saved: Tensor, columns: int, dtype: torch.dtype) -> Tensor:
    """A stand-in for x with the same gradient: the saved x, or 1 and −1 from bits."""
    if saved.dtype != torch.int32:
        return saved
    return unpacked(saved)[..., :columns].to(dtype) * 2 - 1


def fake_backward(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape[-1], dtype=rest[-1])


def derived_backward(dy: Tensor, x: Tensor, scale: float | Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients in plain PyTorch, for double backward.

    scale:  a number, or one for each element
    """
    bias = x.new_zeros(x.shape[-1], dtype=dtype)
    return derived(lambda x, b: ((torch.relu(x) + b) * scale).to(dy.dtype), [x, bias], dy)  # type: ignore[return-value]


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, bias, ctx.scale, _ = inputs
    ctx.dtypes = x.dtype, bias.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if output[1].numel() else x)


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 4
    return *_relu_bias_scale_backward(dy, *ctx.saved_tensors, ctx.scale, *ctx.dtypes), None, None


_relu_bias_scale_backward = operation("relu_bias_scale_backward", _backward, fake_of_saved, reference=_derived)
_relu_bias_scale = operation("relu_bias_scale", _forward, fake_with_bits, _remember, _differentiate)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
    x, bias, ctx.scale = inputs
    ctx.bias_dtype = bias.dtype
    ctx.save_for_backward(x)


def _differentiate_cuda(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    return *_relu_bias_scale_cuda_backward(dy, *ctx.saved_tensors, ctx.scale, ctx.bias_dtype), None


_relu_bias_scale_cuda_backward = operation(
    "relu_bias_scale_cuda_backward", _cuda_backward, fake_backward, reference=derived_backward
)
_relu_bias_scale_cuda = operation("relu_bias_scale_cuda", _cuda_forward, _fake, _save, _differentiate_cuda)


def relu_bias_scale(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    """(relu(x) + bias)·scale.

    x:      … × n
    bias:   n
    scale:  a number

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; the message has the remedy.
    """
    if isinstance(scale, (int, float)) and is_small_with_row(x, bias, 3):
        try:
            return (torch.relu(x) + bias).mul_(scale)
        except REFUSED:
            pass  # the checks below name the reason
    check_arguments(x, bias, scale)
    return _relu_bias_scale(x, bias, float(scale), worth_bits(x, bias))[0] if pays(x, 3) else reference(x, bias, scale)


def cuda(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    """`relu_bias_scale` in CUDA C++; tensors that it does not serve go to torch."""
    check_arguments(x, bias, scale)
    return _relu_bias_scale_cuda(x, bias, float(scale)) if extension.takes(x, bias) else reference(x, bias, scale)


def check_arguments(x: Tensor, bias: Tensor, scale: float) -> None:
    """Check that x, … × n, the bias, n, and the scale, a number, fit.

    Raises:
        ValueError: They do not.
    """
    check_tensors("relu_bias_scale", x, bias)
    check_row("relu_bias_scale", x, "bias", bias)
    if not isinstance(scale, (int, float)):
        raise ValueError(f"relu_bias_scale: the scale is {type(scale).__name__}, and must be a number")


def reference(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    return (torch.relu(x) + bias) * scale


def plain(x: Tensor, bias: Tensor, scale: float) -> Tensor:
    """The textbook kernel, of contiguous tensors."""
    y = torch.empty_like(x)
    size = x.numel()
    launch(relu_bias_scale_plain, ceil_div(size, 1024), x, bias, y, size, x.shape[-1], scale, BLOCK=1024)
    return y


class ReLUBiasScale(nn.Module):
    """(relu(x) + bias)·scale; the bias is a parameter that begins as zero."""

    def __init__(self, features: int, scale: float, **options: Any) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, **options))
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        return relu_bias_scale(x, self.bias, self.scale)


KERNEL = Kernel(
    function=relu_bias_scale,
    reference=reference,
    plain=plain,
    cuda=cuda,
    sources=[SOURCE],
    saved_bytes=lambda x, *_: rows_of_bits(x, has_many(x)).nbytes,
    cases=[
        Case("tail", lambda fill: (fill(11, 1711), fill(1711), 1.5)),
        Case("one row", lambda fill: (fill(1024), fill(1024), -0.75)),
        Case("narrow", lambda fill: (fill(9, 101, 5), fill(5), 2)),
        Case("two dtypes", lambda fill: (fill(5, 64), fill(64).float(), 1.5)),
    ],
    large=Case("large", lambda fill: (fill(2**21 + 1, 1025), fill(1025), 1.5)),
    invalid_cases=[
        Case("a bias of another size", lambda fill: (fill(4, 3), fill(4), 1.5)),
        Case("a bias of two dimensions", lambda fill: (fill(4, 3), fill(4, 3), 1.5)),
        Case("a number", lambda fill: (fill(4, 3)[0, 0], fill(1), 1.5)),
        Case("a scale for each column", lambda fill: (fill(4, 3), fill(3), fill(3))),
        Case("integers", lambda fill: (fill(4, 3).int(), fill(3), 1.5)),
    ],
    benchmarks=[
        Case("16384×8192", lambda fill: (fill(16384, 8192), fill(8192), 1.5), goal=1.01),
        Case("1×1024", lambda fill: (fill(1, 1024), fill(1024), 1.5)),
        Case("128×1024", lambda fill: (fill(128, 1024), fill(1024), 1.5)),
    ],
    sweep=lambda fill, size: (fill(max(size // 1024, 1), 1024), fill(1024), 1.5),
    patterns=[lambda x, bias, scale: (F.relu(x) + bias) * scale],
    worthwhile=lambda x, *_: pays(x, 3),
)
