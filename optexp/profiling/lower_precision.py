"""How long the work of a step takes at least where products are computed in fewer bits."""

from __future__ import annotations

import re
from dataclasses import replace

from optexp.profiling.predicting import CACHE_BYTES, IN_CACHE, Parts, in_tf32
from optexp.profiling.work_list import Piece

PRODUCTS = ("matrix products", "convolutions", "attention")
OPAQUE = ("other operators", "other kernels", "communication")  # nothing is known of their work
SMALL_BYTES = 16 * 2**20  # what moves less is in the cache already

_PRODUCT_KERNEL = re.compile(r"triton_(tem|mm)|gemm")


def in_16_bits(step: Parts, piece: Piece, dtype: str) -> float:
    """µs, over all steps, of a piece under autocast: float32 products at the ceiling of `dtype`, half of the bytes of
    all other float32 work; an optimizer and what is not in float32 as it is."""
    if piece.account == "optimizer" or piece.dtype not in ("", "float32"):
        return piece.us
    if piece.account in PRODUCTS:
        return step.of_work(fused(piece), dtype, narrower=0.5)
    if piece.account in OPAQUE or any(_PRODUCT_KERNEL.search(name) for name in piece.kernels):
        return 0.0
    enters_cache = piece.bytes > SMALL_BYTES and piece.bytes / 2 < CACHE_BYTES
    return piece.us / (IN_CACHE if enters_cache else 2)


def with_tf32(step: Parts, piece: Piece) -> float:
    """µs, over all steps, of a piece where float32 products may be computed in TF32."""
    if piece.account not in PRODUCTS or piece.dtype not in ("", "float32") or in_tf32(piece):
        return piece.us
    return step.of_work(fused(piece), "tf32")


def fused(piece: Piece) -> Piece:
    """Of attention by several kernels only the arithmetic: one kernel keeps the rest to itself."""
    return replace(piece, bytes=0.0) if piece.account == "attention" else piece
