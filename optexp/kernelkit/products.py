"""Tiled products x·wᵀ for tensor cores, in whose accumulators a kernel does the rest of its work before it writes.

Tiles come and go by the copy engine (TMA), which wants rows that begin at multiples of 16 bytes; it fills in zeros
beyond the edges and writes nothing there.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from optexp.kernel import INTERPRETED, ceil_div, launch, multiprocessors


class Tiling(NamedTuple):
    """One tile of the result is m × n, made in steps of k, of which `stages` are on their way at once.

    resident:  programs of a multiprocessor, which go from tile to tile and load the next while they finish one;
               0: a program for each tile, several of which fit on a multiprocessor
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    resident: int = 1


TILINGS = [
    Tiling(128, 256, 64, 8, 3),
    Tiling(256, 128, 64, 8, 3),
    Tiling(128, 128, 64, 8, 4),
    Tiling(128, 256, 64, 8, 3, 0),
    Tiling(128, 128, 64, 4, 2, 0),
    Tiling(128, 128, 32, 4, 4, 0),
    Tiling(64, 128, 64, 4, 4, 0),
    Tiling(64, 64, 128, 4, 4, 0),
]

# Of float32, whose tiles go through registers to be split (`tl.dot(..., input_precision="tf32x3")`).
FLOAT32_TILINGS = [
    Tiling(128, 128, 32, 8, 3),
    Tiling(128, 128, 32, 8, 3, 0),
    Tiling(64, 128, 32, 4, 3, 0),
    Tiling(64, 64, 32, 4, 3, 0),
]


@triton.jit
def place(tile, across_m, across_n, GROUP: tl.constexpr):
    """Row and column of a tile. GROUP rows are walked together, so that what they read is still in L2."""
    width = GROUP * across_n
    first = tile // width * GROUP
    size = tl.minimum(across_m - first, GROUP)
    return first + tile % width % size, tile % width // size


def in_rows(tensor: Tensor) -> Tensor:
    """As a matrix, when all dimensions but the last are rows; there may be nothing in it."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def library_ways(rows: int, weight: Tensor, bias: Tensor | None) -> list[str]:
    """A library's product of so many rows, with its bias or that "apart", by one kernel more; the likely fastest first.

    Of few rows in float32 cuBLAS shares out the sums over columns. It does not where cuBLASLt adds a bias:
    128×1024→1024 takes twice as long.
    """
    if bias is None or weight.dtype != torch.float32:
        return ["library"]
    return ["apart", "library"] if 16 < rows <= 256 else ["library", "apart"]


def in_shape(y: Tensor, x: Tensor) -> Tensor:
    """Rows y in the shape that rows of x have. No view: what autograd sees come out as one of several views, nobody
    could write to in place."""
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[1]))


def tilings(x: Tensor, w: Tensor) -> list[Tiling]:
    """What tensor cores and the copy engine can multiply these matrices by; nothing where they can't.

    Of float32 a product is three of TF32: of what TF32 keeps of both, and of what it leaves of each. The accumulators
    begin anew with each step, and are added up in float32: errors are 0.2 to 0.4 of cuBLAS's, twice of these where it
    shares out the sums over columns. Below 5e-35 what TF32 leaves of a number is not normal, and lost.
    """
    of = {torch.bfloat16: TILINGS, torch.float16: TILINGS, torch.float32: FLOAT32_TILINGS}
    if x.dtype != w.dtype or x.dtype not in of or not has_copy_engine(x.device):
        return []
    (m, k), (n, _) = x.shape, w.shape
    together = 16 // x.element_size()
    if not (min(m, n, k) > 0 and max(m, n, k) < 2**31) or n % together != 0:
        return []  # where a tile lies is told in 32 bits
    (x_stride, x_step), (w_stride, w_step) = x.stride(), w.stride()
    begins = x.data_ptr() % 16 == w.data_ptr() % 16 == 0 and x_stride % together == w_stride % together == 0
    fits = begins and x_step == w_step == 1 and min(x_stride, w_stride) >= k  # not so where a row is expanded
    return of[x.dtype] if fits else []


def takes(x: Tensor, w: Tensor) -> bool:
    """Whether that is possible in half precision, which what is written for Hopper alone takes, too."""
    return x.dtype != torch.float32 and bool(tilings(x, w))


@cache
def has_copy_engine(device: torch.device) -> bool:
    return INTERPRETED or torch.cuda.get_device_capability(device) >= (9, 0)


def product(kernel: Any, tiling: Tiling, x: Tensor, w: Tensor, y: Tensor, *args: Any, **constants: Any) -> None:
    """Run a kernel that computes tiles of a result with rows of x and columns of w, one program a multiprocessor."""
    (m, k), n = x.shape, w.shape[0]
    tiles = ceil_div(m, tiling.m) * ceil_div(n, tiling.n)
    descriptors = (
        TensorDescriptor.from_tensor(x, [tiling.m, tiling.k]),
        TensorDescriptor.from_tensor(w, [tiling.n, tiling.k]),
        TensorDescriptor.from_tensor(y, [tiling.m, tiling.n]),
    )
    programs = min(tiles, tiling.resident * multiprocessors(x.device)) if tiling.resident else tiles
    tile = {"M": tiling.m, "N": tiling.n, "K": tiling.k}
    settings = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    launch(kernel, programs, *args, *descriptors, m, n, k, **constants, **tile, **settings)
