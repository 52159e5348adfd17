"""How long a compiled step takes at least: which kernels stay, and what the others must move once they are fused."""

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

KEPT = ("optimizer", "compiled kernels", *OPAQUE)  # a compiler of model and loss does not touch them
MOVED = ("fills", "casts", "layout copies", "recomputation")  # may vanish altogether
KEPT_ON_HOST = "products, batches and updates as they are"
EXACT = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")  # called as they are
FEW = 32  # a smaller side of a product: it may be computed as a sum
ALIGNED = {"float16": 8, "bfloat16": 8, "float32": 4}  # elements; other products may be padded

_FUSED_ATTENTION = re.compile(r"aten::_(flash|efficient|cudnn|scaled_dot_product_\w+)_attention")


@dataclass(frozen=True)
class Fused:
    """A compiled step on a GPU.

    saved_us: of the device's work, at most;  launches: that are left, at least
    """

    saved_us: float
    launches: float


def on_device(step: Parts, templates: bool = False) -> Fused:
    """What is left of the step's kernels.

    Products stay as they are. What runs between two of them becomes one kernel, which reads the largest tensor that the
    first one reads and writes what the last one writes.

    templates: products, too, are generated code, which may do other work at its end
    """
    steps, left, launches = len(step.trace.steps), 0.0, 0
    for fusible, run in groupby(step.pieces, key=lambda piece: (_fusible(piece), piece.step)):
        if not fusible[0]:
            each = [product_us(step, piece, templates) for piece in run]
            left, launches = left + sum(each), launches + len(each)
        elif not templates:
            least = one_kernel_us(step, list(run))
            left, launches = left + least, launches + (least > 0)
    device = sum(piece.us for piece in step.pieces)
    return Fused((device - left) / steps + step.copied_us("DtoD", "memset"), launches / steps)


def _fusible(piece: Piece) -> bool:
    return piece.account not in KEPT and piece.account not in PRODUCTS


def one_kernel_us(step: Parts, chain: list[Piece]) -> float:
    """Of kernels that run one after the other with no product between them."""
    whole = sum(piece.us for piece in chain)
    if all(piece.account in MOVED for piece in chain) or step.ceilings is None:
        return 0.0
    fastest = max(piece.bytes / piece.us for piece in chain) * 1e6  # bytes/s: of the cache, where they are in it
    rate = max(step.ceilings.bandwidth, fastest)
    return min(whole, MARGIN * 1e6 * (chain[0].read + chain[-1].written) / rate)


def product_us(step: Parts, piece: Piece, templates: bool) -> float:
    """Of a kernel that stays, or of a product that may be computed in another way."""
    if piece.account in KEPT or (_FUSED_ATTENTION.match(piece.name) and not templates):
        return piece.us
    if piece.name in EXACT and piece.account == "matrix products" and not templates:
        sides = [side for shape in piece.shapes for side in shape if len(shape) >= 2]
        if all(side > FEW and side % ALIGNED.get(piece.dtype, 1) == 0 for side in sides):
            return piece.us
    return step.of_work(fused(piece))


def on_host(step: Parts) -> float:
    """µs of a step on a CPU for products, which compiled code calls as they are, and convolutions at half their time at
    the processor's rate of products."""
    products = [op.self_us for op in step.trace.ops if op.name in EXACT]
    left = sum(max(us - TRACED_US, 0.0) for us in products)
    rate = step.ceilings.matrix.get("float32", 0.0) if step.ceilings is not None else 0.0
    others = [work for op in step.trace.ops if op.name not in EXACT and (work := work_of(op)) is not None]
    left += sum(ON_CPU * 1e6 * flops / rate for _, flops in others) if rate else 0.0
    return left / len(step.trace.steps)
