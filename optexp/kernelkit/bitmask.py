"""Bit masks saved for backward in place of numbers: one bit per element, 32 per word, so that a loop can load ahead."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from optexp.kernelkit.elementwise import tile
from optexp.kernelkit.kernel import ceil_div, needs_gradient

BITS_FROM = 2**20  # elements: for fewer, packing and unpacking takes longer than reading the numbers


def has_many(x: Tensor) -> bool:
    """Whether x has enough elements for bits to be faster."""
    return x.numel() >= BITS_FROM


def worth_bits(x: Tensor, *others: Tensor) -> bool:
    """Whether to save bits of x. A symbolic size counts as small, so that no guard makes it concrete.

    Ops take the answer as an argument, because torch.compile guards arguments but not the limit in this file.

    others:  the op's further differentiable inputs
    """
    return needs_gradient((x, *others)) and statically_known_true(has_many(x))


def bits_for(x: Tensor, bits: bool) -> Tensor:
    """Memory for one bit of each element of x: int32 words; empty where `bits` is false."""
    return x.new_empty(ceil_div(x.numel(), 32) if bits else 0, dtype=torch.int32)


def rows_of_bits(x: Tensor, bits: bool) -> Tensor:
    """`bits_for` with a new word at the start of each row: … × ⌈columns / 32⌉."""
    return x.new_empty((*x.shape[:-1], ceil_div(x.shape[-1], 32)) if bits else (0,), dtype=torch.int32)


def unpacked(words: Tensor) -> Tensor:
    """The bits of these words, 1 or 0, in plain PyTorch: … × n becomes … × 32 n."""
    return ((words[..., None] >> torch.arange(32, device=words.device, dtype=torch.int32)) & 1).flatten(-2)


def given(bits: Tensor) -> Tensor | None:
    """The memory for bits; None where it is empty."""
    return bits if bits.numel() else None


@triton.jit
def store_bits(pointer, start, size, bits, BLOCK: tl.constexpr):
    """32 to a word, the first in its lowest place; `start` is a multiple of 32."""
    offsets = tl.arange(0, BLOCK // 32)
    packed = tl.sum(tl.reshape(bits.to(tl.int32), [BLOCK // 32, 32]) << tl.arange(0, 32)[None, :], axis=1)
    tl.store(pointer + start // 32 + offsets, packed, mask=offsets < (size - start + 31) // 32)


@triton.jit
def load_bits(pointer, start, size, BLOCK: tl.constexpr):
    """The bits that `store_bits` stored; false beyond the end."""
    offsets = tl.arange(0, BLOCK // 32)
    packed = tl.load(pointer + start // 32 + offsets, mask=offsets < (size - start + 31) // 32, other=0)
    return tl.reshape((packed[:, None] >> tl.arange(0, 32)[None, :]) & 1, [BLOCK]) != 0


@triton.jit
def store_tile_of_bits(pointer, first, block, rows, columns, bits, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """32 columns to a word, the first in its lowest place; each row begins with a word of its own."""
    start, offsets, mask, _ = tile(first, block, rows, (columns - 1) // 32 + 1, ROWS, BLOCK // 32)
    four = tl.reshape(bits, [ROWS, BLOCK // 32, 4, 8])  # a thread with eight 16-bit elements then needs no shifts
    byte = tl.sum(tl.where(four, 1 << tl.arange(0, 8)[None, None, None, :], 0), axis=3)
    word = tl.sum(byte << (8 * tl.arange(0, 4))[None, None, :], axis=2)
    tl.store(pointer + start + offsets, word, mask=mask)


@triton.jit
def load_tile_of_bits(pointer, first, block, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The bits that `store_tile_of_bits` stored; false outside of the matrix."""
    start, offsets, mask, _ = tile(first, block, rows, (columns - 1) // 32 + 1, ROWS, BLOCK // 32)
    packed = tl.load(pointer + start + offsets, mask=mask, other=0)
    return tl.reshape((packed[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1, [ROWS, BLOCK]) != 0
