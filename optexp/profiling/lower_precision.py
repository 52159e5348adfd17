"""Least time of a step's work where GEMMs, convolutions and attention run in fewer bits."""

from __future__ import annotations

import re
from dataclasses import replace

from optexp.profiling.predicting import CACHE_BYTES, IN_CACHE, Parts, in_tf32
from optexp.profiling.work_list import Piece

PRODUCTS = ("matrix products", "convolutions", "attention")
OPAQUE = ("other operators", "other kernels", "communication")  # accounts of unknown work
SMALL_BYTES = 16 * 2**20  # pieces that move less work in the cache already

_PRODUCT_KERNEL = re.compile(r"triton_(tem|mm)|gemm")


def in_16_bits(step: Parts, piece: Piece, dtype: str) -> float:
    """Least µs, over all steps, of a piece under autocast.

    float32 GEMMs, convolutions and attention run at the ceiling of `dtype`. Other float32 work moves half its bytes.
    Optimizers and work in other dtypes do not change.
    """
    if piece.account == "optimizer" or piece.dtype not in ("", "float32"):
        return piece.us
    if piece.account in PRODUCTS:
        return step.of_work(fused(piece), dtype, narrower=0.5)
    if piece.account in OPAQUE or any(_PRODUCT_KERNEL.search(name) for name in piece.kernels):
        return 0.0
    enters_cache = piece.bytes > SMALL_BYTES and piece.bytes / 2 < CACHE_BYTES
    return piece.us / (IN_CACHE if enters_cache else 2)


def with_tf32(step: Parts, piece: Piece) -> float:
    """Least µs, over all steps, of a piece where float32 GEMMs, convolutions and attention may run in TF32."""
    if piece.account not in PRODUCTS or piece.dtype not in ("", "float32") or in_tf32(piece):
        return piece.us
    return step.of_work(fused(piece), "tf32")


def fused(piece: Piece) -> Piece:
    """The piece; of attention only its arithmetic, as a fused kernel keeps intermediate results on the chip."""
    return replace(piece, bytes=0.0) if piece.account == "attention" else piece
