"""Least time of a compiled step: the kernels that stay, and the bytes that fused kernels must still move."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import groupby

from optexp.measurement.floor import MARGIN
from optexp.profiling.bounds import ON_CPU
from optexp.profiling.lower_precision import OPAQUE, PRODUCTS, fused
from optexp.profiling.predicting import TRACED_US, Parts
from optexp.profiling.work import work_of
from optexp.profiling.work_list import Piece

KEPT = ("optimizer", "compiled kernels", *OPAQUE)  # compiling model and loss does not change these
MOVED = ("fills", "casts", "layout copies", "recomputation")  # fusion may remove these altogether
KEPT_ON_HOST = "products, batches and updates as they are"
EXACT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")  # compiled code calls the same operators
FEW = 32  # a GEMM with a side up to this may be computed as a reduction instead
ALIGNED = {"float16": 8, "bfloat16": 8, "float32": 4}  # elements: sides that these do not divide may be padded

_FUSED_ATTENTION = re.compile(r"aten::_(flash|efficient|cudnn|scaled_dot_product_\w+)_attention")


@dataclass(frozen=True)
class Fused:
    """A compiled step on a GPU.

    saved_us: most µs saved of the device's work;  launches: fewest launches left
    """

    saved_us: float
    launches: float


def on_device(step: Parts, templates: bool = False) -> Fused:
    """Work and launches that fusion leaves of the step's kernels.

    GEMMs, convolutions and attention stay. All kernels between two of them become one kernel, which reads the largest
    operand of the first and writes the largest result of the last.

    templates: GEMMs are generated code too, so that neighbouring work may be fused into them
    """
    steps, left_us, launches = len(step.trace.steps), 0.0, 0
    for fusible, run in groupby(step.pieces, key=lambda piece: (_fusible(piece), piece.step)):
        if not fusible[0]:
            kept_us = [product_us(step, piece, templates) for piece in run]
            left_us, launches = left_us + sum(kept_us), launches + len(kept_us)
        elif not templates:
            fused_us = one_kernel_us(step, list(run))
            left_us, launches = left_us + fused_us, launches + (fused_us > 0)
    device = sum(piece.us for piece in step.pieces)
    return Fused((device - left_us) / steps + step.copied_us("DtoD", "memset"), launches / steps)


def _fusible(piece: Piece) -> bool:
    return piece.account not in KEPT and piece.account not in PRODUCTS


def one_kernel_us(step: Parts, chain: list[Piece]) -> float:
    """Least µs of consecutive kernels without a GEMM, convolution or attention between them, as one kernel."""
    whole = sum(piece.us for piece in chain)
    if all(piece.account in MOVED for piece in chain) or step.ceilings is None:
        return 0.0
    fastest = max(piece.bytes / piece.us for piece in chain) * 1e6  # bytes/s, which may be the cache's
    rate = max(step.ceilings.bandwidth, fastest)
    return min(whole, MARGIN * 1e6 * (chain[0].read + chain[-1].written) / rate)


def product_us(step: Parts, piece: Piece, templates: bool) -> float:
    """Least µs of a kernel that stays, or of one (GEMM, convolution, attention) that may be computed in another way."""
    if piece.account in KEPT or (_FUSED_ATTENTION.match(piece.name) and not templates):
        return piece.us
    if piece.name in EXACT and piece.account == "matrix products" and not templates:
        sides = [side for shape in piece.shapes for side in shape if len(shape) >= 2]
        if all(side > FEW and side % ALIGNED.get(piece.dtype, 1) == 0 for side in sides):
            return piece.us
    return step.of_work(fused(piece), split=templates)  # as generated GEMMs do


def on_host(step: Parts) -> float:
    """Least µs of a compiled step on a CPU: its GEMMs, which stay as they are, and its other known work (convolutions),
    at `ON_CPU` of the time that it takes at the calibrated flop/s."""
    products = [op.self_us for op in step.trace.ops if op.name in EXACT]
    least_us = sum(max(us - TRACED_US, 0.0) for us in products)
    rate = step.ceilings.matrix.get("float32", 0.0) if step.ceilings is not None else 0.0
    others = [work for op in step.trace.ops if op.name not in EXACT and (work := work_of(op)) is not None]
    least_us += sum(ON_CPU * 1e6 * flops / rate for _, flops in others) if rate else 0.0
    return least_us / len(step.trace.steps)
