"""dropout(relu(x) + bias) in one pass. No mask is stored: backward draws the same numbers once more.

Of x, backward needs to know of each element whether relu lets it through: as in `relu_bias_scale`.

Numbers come from Philox, a function of seed and position. The seed is one number on the device, drawn from torch's
generator: the same torch seed gives the same mask, and each replay of a CUDA graph gives another.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from optexp.kernelkit.bitmask import given, has_many, load_tile_of_bits, rows_of_bits, store_tile_of_bits, worth_bits
from optexp.kernelkit.elementwise import begin, from_last, over_columns, over_tiles, place, share, tile, wide
from optexp.kernelkit.kernel import (
    REFUSED,
    Case,
    Kernel,
    ceil_div,
    check_row,
    check_tensors,
    is_small_with_row,
    operation,
    pays,
)
from optexp.kernelkit.launching import launch
from optexp.kernels.relu_bias_scale import derived_backward, fake_of_saved, fake_with_bits, relu_bias_scale, x_of

STEPS = 2**16  # a drawn number has 16 bits: eight elements share the four words that Philox makes at once


@triton.jit
def philox(seed, first, second):
    """Four words for each pair of words: Philox4x32-7, the fewest rounds that pass BigCrush (Salmon et al., 2011).

    As `tl.philox`, but one multiplication of 64 bits for what is two there, its high word and its low one.
    """
    a, b = first.to(tl.uint32), second.to(tl.uint32)
    c, d = tl.zeros_like(a), tl.zeros_like(b)
    low, high = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        left, right = a.to(tl.uint64) * 0xD2511F53, c.to(tl.uint64) * 0xCD9E8D57
        a, c = (right >> 32).to(tl.uint32) ^ b ^ low, (left >> 32).to(tl.uint32) ^ d ^ high
        b, d = right.to(tl.uint32), left.to(tl.uint32)
        low, high = low + 0x9E3779B9, high + 0xBB67AE85
    return a, b, c, d


@triton.jit
def factors(seed, first, block, threshold, scale, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The factors of a tile: `scale` for an element that stays, whose number is at least the threshold, else zero.

    As in torch, an infinite element stays visible (inf·0 is NaN). Rounding follows the multiplication, because a choice
    between rounded numbers would move halves of registers.
    """
    group = block * (BLOCK // 8) + tl.arange(0, BLOCK // 8)[None, :]
    row = tl.cast(first, tl.int32) + tl.arange(0, ROWS)[:, None]  # beyond 2³¹ rows by their low 32 bits
    zero = tl.zeros([ROWS, BLOCK // 8], tl.int32)
    a, b, c, d = philox(seed, zero + group, zero + row)
    words = tl.join(tl.join(a, b), tl.join(c, d))
    numbers = tl.join(words << 16, words)  # compared by their high halves: those of the threshold's low one are zero
    stays = tl.reshape(numbers, [ROWS, BLOCK]) >= tl.cast(threshold, tl.uint32) << 16
    return tl.where(stays, scale, 0.0)


@triton.jit
def relu_bias_dropout_forward(
    x_ptr, bias_ptr, seed_ptr, passed_ptr, y_ptr, rows, columns, threshold, scale: tl.float64,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    number, block = place(columns, WHOLE, BLOCK)
    first = tl.cast(number, tl.int64) * ROWS
    start, offsets, mask, column = tile(first, block, rows, columns, ROWS, BLOCK)
    bias = wide(tl.load(bias_ptr + column, mask=column < columns))
    x, seed = wide(tl.load(x_ptr + start + offsets, mask=mask, other=0.0)), tl.load(seed_ptr)
    tl.debug_barrier()  # else ptxas moves half of the loads behind the numbers, to spare registers
    if passed_ptr is not None:
        store_tile_of_bits(passed_ptr, first, block, rows, columns, (x <= 0) == 0, ROWS, BLOCK)
    y = tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL) + bias
    y *= factors(seed, first, block, threshold, tl.cast(scale, bias.dtype), ROWS, BLOCK)
    tl.store(y_ptr + start + offsets, y.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def relu_bias_dropout_backward(
    dy_ptr, saved_ptr, seed_ptr, dx_ptr, sums_ptr, rows, columns, threshold, scale: tl.float64,
    WIDE: tl.constexpr, ALONE: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """dx, and for each group of rows the sum of what arrives at the bias.

    Saved is x, or one bit for each element: whether it passed.
    """
    bits: tl.constexpr = saved_ptr.dtype.element_ty == tl.int32
    lone: tl.constexpr = ALONE and STAGES == 1
    begin(PDL, LETS_NEXT=lone, LETS_SUMS=not ALONE)
    block, group, count = share(columns, ALONE, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], WIDE)
    if not lone:
        seed = tl.load(seed_ptr)
    for number in tl.range(group, (rows - 1) // ROWS + 1, count, num_stages=STAGES):
        first = from_last(number, rows, ROWS)
        start, offsets, mask, column = tile(first, block, rows, columns, ROWS, BLOCK)
        if not bits:
            x = tl.load(saved_ptr + start + offsets, mask=mask).to(WIDE)
        dy = tl.load(dy_ptr + start + offsets, mask=mask, other=0.0).to(WIDE)
        if (
            lone
        ):  # no other program hides a latency: else ptxas makes the numbers while it waits for x, and then loads dy
            tl.debug_barrier()
            seed = tl.load(seed_ptr)
        # Behind dy: bits are handed out to threads, by a barrier.
        passed = load_tile_of_bits(saved_ptr, first, block, rows, columns, ROWS, BLOCK) if bits else (x <= 0) == 0
        dy *= factors(seed, first, block, threshold, tl.cast(scale, WIDE), ROWS, BLOCK)
        tl.store(dx_ptr + start + offsets, tl.where(passed, dy, 0.0).to(dx_ptr.dtype.element_ty), mask=mask)
        sums += dy
    column = block * BLOCK + tl.arange(0, BLOCK)
    sums = tl.sum(sums, axis=0)
    tl.store(sums_ptr + group * columns + column, sums.to(sums_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def relu_bias_dropout_plain(x_ptr, bias_ptr, y_ptr, size, columns, p, seed, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask)
    y = tl.maximum(x, 0.0) + tl.load(bias_ptr + offsets % columns, mask=mask)
    y = tl.where(tl.rand(seed, offsets) >= p, y / (1.0 - p), 0.0)
    tl.store(y_ptr + offsets, y, mask=mask)


def _drop(p: float) -> dict[str, Any]:
    """p in steps, and what makes up for the dropped: by the share that stays in steps too, so that the mean is kept.

    Where nothing stays, that is zero; the threshold then has a bit too many, and does not matter.
    """
    threshold = round(p * STEPS)
    return {"threshold": threshold, "scale": STEPS / (STEPS - threshold) if threshold < STEPS else 0.0}


def _forward(x: Tensor, bias: Tensor, seed: Tensor, p: float, bits: bool) -> tuple[Tensor, Tensor]:
    """The result and, if wanted, which elements relu lets through: a bit for each."""
    y, passed = fake_with_bits(x, bias, bits)
    operands = (x.contiguous(), bias.contiguous(), seed, given(passed))
    # No PDL: torch's kernel of the seed never triggers dependents. With more registers fewer programs would fit.
    how = {"maxnreg": 40, "without_pdl": True}
    return over_tiles(relu_bias_dropout_forward, y, *operands, **how, **_drop(p)), passed


def _backward(
    dy: Tensor, saved: Tensor, seed: Tensor, p: float, dtype: torch.dtype, bias: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The gradients of x and of the bias, in their dtypes; `saved` is x, or bits."""
    dx, operands = dy.new_empty(dy.shape, dtype=dtype), (dy.contiguous(), saved.contiguous(), seed)
    return over_columns(relu_bias_dropout_backward, dx, bias, *operands, **_drop(p))


def _derived(
    dy: Tensor, saved: Tensor, seed: Tensor, p: float, dtype: torch.dtype, bias: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The mask is what comes back where ones arrive at ones."""
    x = x_of(saved, dy.shape[-1], dtype)
    ones = torch.ones(x.shape, dtype=dy.dtype, device=dy.device)  # dy may be many at once
    mask, _ = _backward(ones, ones, seed, p, dy.dtype, bias)
    return derived_backward(dy, x, mask, bias)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, bias, seed, ctx.p, _ = inputs
    ctx.dtypes = x.dtype, bias.dtype
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output[1] if output[1].numel() else x, seed)


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    return *_relu_bias_dropout_backward(dy, *ctx.saved_tensors, ctx.p, *ctx.dtypes), None, None, None


_relu_bias_dropout_backward = operation("relu_bias_dropout_backward", _backward, fake_of_saved, reference=_derived)
_relu_bias_dropout = operation("relu_bias_dropout", _forward, fake_with_bits, _remember, _differentiate)


def relu_bias_dropout(x: Tensor, bias: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """dropout(relu(x) + bias).

    x:         … × n
    bias:      n
    p:         probability to drop an element, rounded to steps of 1/65536
    training:  false: nothing is dropped

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; the message has the remedy.
    """
    if is_small_with_row(x, bias, 3):
        try:
            return torch.dropout(torch.relu(x) + bias, p, training)  # without what F does in Python
        except REFUSED:
            pass  # the checks below name the reason
    check_tensors("relu_bias_dropout", x, bias)
    check_row("relu_bias_dropout", x, "bias", bias)
    if not isinstance(p, (int, float)) or not 0.0 <= p <= 1.0:
        raise ValueError(f"relu_bias_dropout: p is {p!r}, and must be a probability, from 0 to 1")
    if not pays(x, 3):
        return reference(x, bias, p, training)
    if not training:
        return relu_bias_scale(x, bias, 1.0)
    seed = torch.randint(2**63 - 1, (1,), device=x.device)  # `random_` is quicker, and not the same in compiled code
    y: Tensor = _relu_bias_dropout(x, bias, seed, float(p), worth_bits(x, bias))[0]
    return y


def reference(x: Tensor, bias: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    return F.dropout(torch.relu(x) + bias, p, training)


def plain(x: Tensor, bias: Tensor, p: float = 0.5, training: bool = True) -> Tensor:
    """The textbook kernel, of contiguous tensors; the seed travels through the host."""
    y, size = torch.empty_like(x), x.numel()
    seed = int(torch.randint(2**31 - 1, ()))
    programs = ceil_div(size, 1024)
    launch(relu_bias_dropout_plain, programs, x, bias, y, size, x.shape[-1], p * training, seed, BLOCK=1024)
    return y


class ReLUBiasDropout(nn.Module):
    """dropout(relu(x) + bias), which drops in training only; the bias is a parameter that begins as zero."""

    def __init__(self, features: int, p: float = 0.5, **options: Any) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(features, **options))
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return relu_bias_dropout(x, self.bias, self.p, self.training)


KERNEL = Kernel(
    function=relu_bias_dropout,
    reference=reference,
    plain=plain,
    saved_bytes=lambda x, *_: rows_of_bits(x, has_many(x)).nbytes,
    cases=[
        Case("tail", lambda fill: (fill(11, 1711), fill(1711), 0.0)),
        Case("not training", lambda fill: (fill(11, 1711), fill(1711), 0.5, False)),
        Case("one row", lambda fill: (fill(1024), fill(1024), 0.0)),
        Case("narrow", lambda fill: (fill(9, 101, 5), fill(5), 0.0)),
        Case("two dtypes", lambda fill: (fill(5, 64), fill(64).float(), 0.0)),
        Case("everything dropped", lambda fill: (fill(5, 64), fill(64), 1.0)),
    ],
    large=Case("large", lambda fill: (fill(2**21 + 1, 1025), fill(1025), 0.0)),
    invalid_cases=[
        Case("a bias of another size", lambda fill: (fill(4, 3), fill(4), 0.5)),
        Case("no probability", lambda fill: (fill(4, 3), fill(3), 1.5)),
        Case("integers", lambda fill: (fill(4, 3).int(), fill(3), 0.5)),
    ],
    benchmarks=[
        Case("16384×8192", lambda fill: (fill(16384, 8192), fill(8192), 0.1), goal=1.05),
        Case("128×1024", lambda fill: (fill(128, 1024), fill(1024), 0.1)),
    ],
    sweep=lambda fill, size: (fill(max(size // 1024, 1), 1024), fill(1024), 0.1),
    patterns=[lambda x, bias, p, training: F.dropout(torch.relu(x) + bias, p, training)],
    worthwhile=lambda x, *_: pays(x, 3),
)
