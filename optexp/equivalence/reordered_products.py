"""Products and convolutions, their terms in groups that are added up in another order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optexp.equivalence import tf32_operands
from optexp.equivalence.reordered_sums import WHOLE, added
from optexp.equivalence.rounding_steps import NARROW

if TYPE_CHECKING:
    from optexp.equivalence.reassociation import Reassociated

PRODUCT_CHUNKS, PRODUCT_CHUNK = 16, 16  # at most so many of a product's terms, of at least so many each


def _mm(mode: Reassociated, func: Any, a: Tensor, b: Tensor, **kwargs: Any) -> Tensor:
    return _in_chunks(mode, func, a, b, a.dim() - 1, max(b.dim() - 2, 0), **kwargs)


def _in_chunks(mode: Reassociated, func: Any, a: Tensor, b: Tensor, of_a: int, of_b: int, **kwargs: Any) -> Tensor:
    """A product, its terms in groups one after the other; of narrow numbers in float32, as tensor cores add them up."""
    if tf32 := tf32_operands.in_products(a):
        a, b = mode.in_tf32(a, b)
    mode.met(tf32_operands.TF32 * tf32)
    terms, dtype = a.shape[of_a], a.dtype
    count = min(PRODUCT_CHUNKS, terms // PRODUCT_CHUNK)
    if count < 2 or kwargs:
        return func(a, b, **kwargs)  # type: ignore[no-any-return]
    wide = torch.float32 if dtype in NARROW else dtype
    if a.numel() + b.numel() <= WHOLE:
        a, b = a.to(wide), b.to(wide)
    pairs = list(zip(a.tensor_split(count, of_a), b.tensor_split(count, of_b), strict=True))
    return sum_of((func(pairs[at][0].to(wide), pairs[at][1].to(wide)) for at in mode.shuffled(count)), dtype)


def _convolution(mode: Reassociated, func: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """Input channels in groups, one after the other."""
    if tf32 := tf32_operands.in_convolutions(x):
        x, weight = mode.in_tf32(x, weight)
    mode.met(tf32_operands.TF32 * tf32)
    transposed, groups = rest[3], rest[5]
    channels, dtype = x.shape[1] if x.dim() == weight.dim() else 0, x.dtype
    count = min(PRODUCT_CHUNKS, channels) if groups == 1 else 1
    if count < 2:
        return func(x, weight, bias, *rest)  # type: ignore[no-any-return]
    wide = torch.float32 if dtype in NARROW else dtype
    pairs = list(zip(x.tensor_split(count, 1), weight.tensor_split(count, 0 if transposed else 1), strict=True))
    parts = (func(pairs[at][0].to(wide), pairs[at][1].to(wide), None, *rest) for at in mode.shuffled(count))
    total = sum_of(parts, wide)
    if bias is not None:
        total.add_(bias.to(wide).reshape(-1, *[1] * (total.dim() - 2)))
    return total.to(dtype)


def _convolution_backward(
    mode: Reassociated, func: Any, slope: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    """Of inputs the output channels in groups, of weights the batch, of a bias all."""
    if tf32 := tf32_operands.in_convolutions(x):
        slope, x, weight = mode.in_tf32(slope, x, weight)
    mode.met(tf32_operands.TF32 * tf32)
    *how, (to_x, to_weight, to_bias) = rest
    transposed, groups = how[3], how[5]
    wide = torch.float32 if x.dtype in NARROW else x.dtype

    def part(slope: Tensor, x: Tensor, weight: Tensor, at: int) -> Tensor:
        mask = [index == at for index in range(3)]
        found: Tensor = func(slope.to(wide), x.to(wide), weight.to(wide), None, *how, mask)[at]
        return found

    found: list[Tensor | None] = [None, None, None]
    if to_x:
        count = min(PRODUCT_CHUNKS, slope.shape[1]) if groups == 1 else 1
        of = list(zip(slope.tensor_split(count, 1), weight.tensor_split(count, 1 if transposed else 0), strict=True))
        found[0] = sum_of((part(of[at][0], x, of[at][1], 0) for at in mode.shuffled(count)), x.dtype)
    if to_weight:
        count = min(PRODUCT_CHUNKS, len(x))
        rows = list(zip(slope.tensor_split(count), x.tensor_split(count), strict=True))
        found[1] = sum_of((part(*rows[at], weight, 1) for at in mode.shuffled(count)), weight.dtype)
    if to_bias:
        found[2] = added(mode, slope, [axis for axis in range(slope.dim()) if axis != 1]).to(slope.dtype)
    return tuple(found)


def sum_of(parts: Iterator[Tensor], dtype: torch.dtype) -> Tensor:
    total = next(parts)
    for part in parts:
        total.add_(part)
    return total.to(dtype)


REORDERED: Mapping[str, Callable[..., Any]] = {
    "mm": _mm,
    "bmm": _mm,
    "mv": _mm,
    "dot": _mm,
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
}
