"""Tiled GEMMs x·wᵀ for tensor cores; kernels apply further operations to the accumulators before they write.

The tensor memory accelerator (TMA) loads and stores tiles. It needs rows that begin at multiples of 16 bytes; beyond
the edges of a matrix it loads zeros and stores nothing.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from optexp.kernelkit.capability import TMA
from optexp.kernelkit.kernel import ceil_div, contiguous, multiprocessors, operation
from optexp.kernelkit.launching import INTERPRETED, launch
from optexp.kernelkit.tuning import bucket, fastest


class Tiling(NamedTuple):
    """The configuration of a GEMM: tiles of the result are m × n, computed in steps of k.

    stages:    steps of k in flight at once
    resident:  persistent programs per multiprocessor, which load the next tile while they finish one; 0: a program per
               tile, several of which fit on a multiprocessor
    parts:     split-k, for few tiles: number of parts of the sum over k, which are added up afterwards
    """

    m: int
    n: int
    k: int
    warps: int
    stages: int
    resident: int = 1
    parts: int = 1


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

# For float32, whose tiles pass through registers to be split (`tl.dot(..., input_precision="tf32x3")`).
TALL = Tiling(128, 64, 32, 4, 3, 0)
FLOAT32_TILINGS = [
    Tiling(128, 128, 32, 8, 3),
    TALL,
    Tiling(64, 128, 32, 4, 3, 0),
    Tiling(64, 64, 32, 4, 3, 0),
]


@triton.jit
def place(tile, across_m, across_n, GROUP: tl.constexpr):
    """Row and column of a tile. GROUP rows are processed together, so that their operands are still in L2."""
    width = GROUP * across_n
    first = tile // width * GROUP
    size = tl.minimum(across_m - first, GROUP)
    return first + tile % width % size, tile % width // size


def in_rows(tensor: Tensor) -> Tensor:
    """The tensor as a matrix whose rows are all dimensions but the last; it may be empty."""
    return tensor.reshape(math.prod(tensor.shape[:-1]), tensor.shape[-1])


def library_configs(rows: int, weight: Tensor, bias: Tensor | None) -> list[str]:
    """The library's configs, the likely faster first: "library" adds the bias in the GEMM, "apart" in another kernel.

    For few rows in float32 cuBLAS splits k. cuBLASLt, which adds a bias, does not: 128×1024→1024 takes twice as long.

    rows:    m
    weight:  n × k
    bias:    n, or None
    """
    if bias is None or weight.dtype != torch.float32:
        return ["library"]
    return ["apart", "library"] if 16 < rows <= 256 else ["library", "apart"]


def in_shape(y: Tensor, x: Tensor) -> Tensor:
    """y, m × n, in the shape … × n for an x of … × k.

    The result is no view: autograd forbids in-place writes to one of several views that an op returns.
    """
    return y if x.dim() == 2 else torch.ops.aten._unsafe_view.default(y, (*x.shape[:-1], y.shape[1]))


def tilings(x: Tensor, w: Tensor) -> list[Tiling]:
    """The tilings of x·wᵀ, m × k by n × k, on tensor cores with TMA; empty where these cannot take the matrices.

    A float32 GEMM is computed by three TF32 GEMMs: of the parts that TF32 keeps of both operands, and of the rest of
    each operand with the kept part of the other. Accumulators start from 0 at each step, and are added up in float32.
    Errors are 0.2 to 0.4 times those of cuBLAS, or twice as much where cuBLAS splits k. Below 5e-35 the rest is
    subnormal and lost (6e-6 of a result of 1e-36, 2e-4 of one of 3e-38). From 3.402e38 on, just below the largest
    float32, operands round to infinity.
    """
    if not (multipliable(x, w) and lies_in_rows(x) and lies_in_rows(w)):
        return []
    return FLOAT32_TILINGS if x.dtype == torch.float32 else TILINGS


def multipliable(x: Tensor, w: Tensor) -> bool:
    """Whether tensor cores and TMA can take x·wᵀ, m × k by n × k, by dtype, device and sizes; layout is not checked."""
    (m, k), n = x.shape, w.shape[0]
    if x.dtype != w.dtype or x.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return False
    small = min(m, n, k) > 0 and max(m, n, k) < 2**31 - 256  # begin and end of a tile are 32-bit numbers
    return small and n * x.element_size() % 16 == 0 and has_copy_engine(x.device)


def lies_in_rows(matrix: Tensor) -> bool:
    """Whether rows begin at multiples of 16 bytes and do not overlap, as they do in an expanded tensor."""
    stride, step = matrix.stride()
    begins = matrix.data_ptr() % 16 == 0 and stride * matrix.element_size() % 16 == 0
    return begins and step == 1 and stride >= matrix.shape[1]


def takes(x: Tensor, w: Tensor) -> bool:
    """Whether there are 16-bit tilings for x·wᵀ; the Hopper GEMMs take the same matrices."""
    return x.dtype != torch.float32 and bool(tilings(x, w))


@cache
def has_copy_engine(device: torch.device) -> bool:
    return INTERPRETED or TMA.met_by(device)


def launch_gemm(kernel: Any, tiling: Tiling, x: Tensor, w: Tensor, y: Tensor, *args: Any, **constants: Any) -> None:
    """Launch a kernel that computes tiles of y = x·wᵀ.

    kernel:     takes args, tensor descriptors of x, w and y, and m, n, k
    x, w, y:    m × k, n × k, m × n; the profiler counts the GEMM's work by these three
    args:       further tensors and descriptors
    constants:  constexprs besides those of the tiling
    """
    (m, k), n = x.shape, w.shape[0]
    tiles = ceil_div(m, tiling.m) * ceil_div(n, tiling.n) * tiling.parts
    descriptors = (
        _described(x, tiling.m, tiling.k),
        _described(w, tiling.n, tiling.k),
        _described(y, tiling.m, tiling.n),
    )
    programs = min(tiles, tiling.resident * multiprocessors(x.device)) if tiling.resident else tiles
    tile = {"M": tiling.m, "N": tiling.n, "K": tiling.k}
    settings = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    launch(kernel, programs, *args, *descriptors, m, n, k, **constants, **tile, **settings)


def _described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of tiles of rows × columns; for a column-major matrix, of tiles of its transpose."""
    if stands(matrix):
        return TensorDescriptor.from_tensor(matrix.T, [columns, rows])
    return TensorDescriptor.from_tensor(matrix, [rows, columns])


def stands(matrix: Tensor) -> bool:
    """Whether the matrix is column-major, such as a transposed one."""
    return matrix.stride(1) != 1


# --- of float32, alone -------------------------------------------------------------------------------------------


@triton.jit
def float32_gemm(
    bias_ptr, x_desc, w_desc, y_desc, m, n, k, parts,
    STANDS: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Tiles of y = x·wᵀ + bias; with split-k, the parts of y lie one below the other. TMA loads zeros beyond k.

    A column-major x (STANDS) costs nothing, as x goes through registers. A column-major w would cost more than the
    GEMM, as tensor cores read w from shared memory.
    """
    across_m, across_n = tl.cdiv(m, M), tl.cdiv(n, N)
    steps = tl.cdiv(tl.cdiv(k, K), parts)
    for number in tl.range(tl.program_id(0), across_m * across_n * parts, tl.num_programs(0), flatten=FLATTEN):
        part = number // (across_m * across_n)
        row, column = place(number % (across_m * across_n), across_m, across_n, GROUP=8)
        y = tl.zeros([M, N], tl.float32)
        for step in range(part * steps, part * steps + steps):
            x = x_desc.load([step * K, row * M]).T if STANDS else x_desc.load([row * M, step * K])
            w = w_desc.load([column * N, step * K])
            y = tl.dot(x, w.T, y, input_precision="tf32x3")
        if bias_ptr is not None:
            columns = column * N + tl.arange(0, N)
            y += tl.load(bias_ptr + columns, mask=columns < n, other=0.0)[None, :]
        y_desc.store([(part * across_m + row) * M, column * N], y)


def multiply_by_tiles(tiling: Tiling, x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·wᵀ + bias as `multiply`, in float32, by one of `float32_tilings`."""
    (m, _), n = x.shape, w.shape[0]
    if not lies_in_rows(w):
        w = w.clone(memory_format=torch.contiguous_format)
    shared = tiling.parts > 1
    rows = ceil_div(m, tiling.m) * tiling.m if shared else m  # a tile's last rows must not lie in the next part
    y = x.new_empty(tiling.parts * rows, n)
    form = {"STANDS": stands(x), "FLATTEN": tiling.resident > 0}
    launch_gemm(float32_gemm, tiling, x, w, y, None if shared else contiguous(bias), parts=tiling.parts, **form)
    if not shared:
        return y
    y = y.view(tiling.parts, rows, n)[:, :m].sum(0)
    return y if bias is None else y.add_(bias)


def float32_tilings(x: Tensor, w: Tensor) -> list[Tiling]:
    """The tilings of x·wᵀ, m × k by n × k, in float32, each row- or column-major; empty where tensor cores cannot."""
    (m, k), n = x.shape, w.shape[0]
    lie = (lies_in_rows(x) or lies_in_rows(x.T)) and (lies_in_rows(w) or k % 4 == 0)  # w is copied, else
    if x.dtype != torch.float32 or not (lie and multipliable(x, w)):
        return []
    tiles, at_once = ceil_div(m, TALL.m) * ceil_div(n, TALL.n), 4 * multiprocessors(x.device)
    parts = [count for count in (2, 4, 8) if count * tiles <= at_once and k >= 128 * count]
    return FLOAT32_TILINGS + [TALL._replace(parts=count) for count in parts]


def _multiply(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    def run(config: Tiling | str) -> Tensor:
        if isinstance(config, Tiling):
            return multiply_by_tiles(config, x, w, bias)
        if config == "apart" and bias is not None:
            return (x @ w.T).add_(bias)
        return F.linear(x, w, bias)

    configs: list[Tiling | str] = [*library_configs(x.shape[0], w, bias), *float32_tilings(x, w)]
    # With TF32, where the user allows it, the library's GEMM takes a third of its time.
    precision = torch.backends.cuda.matmul.fp32_precision
    key = (precision, bias is None, lies_in_rows(x), lies_in_rows(w), *map(bucket, x.shape), w.shape[0])
    return run(fastest("multiply", key, configs, run, x.device))


_multiply_float32 = operation("multiply", _multiply, lambda x, w, bias: x.new_empty(x.shape[0], w.shape[0]))


def multiply(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """x·wᵀ + bias, m × n, for use inside kernels: it has no gradient.

    float32 takes the fastest of the library's GEMM and our three TF32 GEMMs (see `tilings`); other dtypes and autocast
    take the library's.

    x:     m × k
    w:     n × k
    bias:  n, or None
    """
    if x.dtype != torch.float32 or torch.is_autocast_enabled(x.device.type):
        return F.linear(x, w, bias)
    y: Tensor = _multiply_float32(x, w, bias)
    return y
