"""LayerNorm and the linear layer after it as one Triton GEMM with folded weights, γ⊙w.

With r = 1/deviation and μ the mean of a row, γ and β the norm's parameters:

    y = r·(x·(γ⊙w)ᵀ) − r·μ·Σ(γ⊙w) + (w·β + bias)

The sum over γ⊙w takes the rounded values that the GEMM reads, so the mean cancels exactly. A mean that is large beside
the deviation costs the accumulators bits; such tiles are computed again from centred rows.

An infinite weight or parameter makes these sums infinite, and infinities would cancel that do not cancel in norm and
GEMM one after the other. Such tiles are computed again from normalised rows and w itself.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optexp.kernelkit.elementwise import begin
from optexp.kernelkit.gemm import Tiling, launch_gemm, place
from optexp.kernelkit.kernel import contiguous, power_of_two
from optexp.kernelkit.launching import launch

LARGE_MEAN = tl.constexpr(16.0)  # deviations; the accumulators then hold 4 bits that cancel
INFINITE = tl.constexpr(float("inf"))


@triton.jit
def layernorm_linear_fold(
    w_ptr, gamma_ptr, beta_ptr, bias_ptr, folded_ptr, sum_ptr, offset_ptr, k, w_stride,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row of γ⊙w, its sum after rounding, and its w·β + bias. Where Σw·β is not finite, neither is the sum."""
    begin(PDL)
    row = tl.program_id(0)
    w_ptr += row.to(tl.int64) * w_stride
    folded_ptr += row.to(tl.int64) * k
    total = tl.zeros([BLOCK], tl.float32)
    offset = tl.zeros([BLOCK], tl.float32)
    for first in range(0, k, BLOCK):
        inner = first + tl.arange(0, BLOCK)
        w = tl.load(w_ptr + inner, mask=inner < k, other=0.0).to(tl.float32)
        if beta_ptr is not None:
            offset += w * tl.load(beta_ptr + inner, mask=inner < k, other=0.0).to(tl.float32)
        if gamma_ptr is not None:
            w *= tl.load(gamma_ptr + inner, mask=inner < k, other=0.0).to(tl.float32)
        folded = w.to(folded_ptr.dtype.element_ty)
        tl.store(folded_ptr + inner, folded, mask=inner < k)
        total += folded.to(tl.float32)
    constant = tl.sum(offset, axis=0)
    tl.store(sum_ptr + row, tl.where(tl.abs(constant) < INFINITE, tl.sum(total, axis=0), constant))
    if bias_ptr is not None:
        constant += tl.load(bias_ptr + row).to(tl.float32)
    tl.store(offset_ptr + row, constant)


@triton.jit
def unfolded(
    x_ptr, w_ptr, gamma_ptr, beta_ptr, rows, columns, mean, scale, n, k, x_stride, w_stride,
    M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A tile of the GEMM of normalised rows, rounded as the norm rounds them, and w. Short steps take few registers:
    the rest of the kernel leaves none."""
    x_ptr += rows[:, None] * x_stride
    w_ptr += tl.minimum(columns, n - 1).to(tl.int64)[:, None] * w_stride
    z = tl.zeros([M, N], tl.float32)
    for first in tl.range(0, k, STEP, num_stages=1):
        inner = first + tl.arange(0, STEP)
        inside = inner < k
        x = tl.load(x_ptr + inner[None, :], mask=inside[None, :], other=0.0).to(tl.float32)
        w = tl.load(w_ptr + inner[None, :], mask=inside[None, :], other=0.0)
        x = (x - mean[:, None]) * scale[:, None]
        if gamma_ptr is not None:
            x *= tl.load(gamma_ptr + inner, mask=inside, other=0.0).to(tl.float32)[None, :]
        if beta_ptr is not None:
            x += tl.load(beta_ptr + inner, mask=inside, other=0.0).to(tl.float32)[None, :]
        z = tl.dot(tl.where(inside[None, :], x, 0.0).to(w.dtype), w.T, z)
    return z


@triton.jit
def layernorm_linear_forward(
    x_ptr, sum_ptr, offset_ptr, w_ptr, gamma_ptr, beta_ptr, bias_ptr, x_desc, w_desc, y_desc, m, n, k,
    x_stride, w_stride, eps: tl.float64,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Tiles of y from x and the folded w; mean and deviation of the rows come out of the same loop.

    What the sums read comes by a load of its own, and what the GEMM reads is read by nothing else: of a tile that
    both read, Triton (to 3.7 at least) keeps one buffer less than its asynchronous GEMM needs.
    """
    x_stride, inside = x_stride // 8 * 8, k // 8 * 8  # which they are: 16 bytes at a time
    across_m, across_n = tl.cdiv(m, M), tl.cdiv(n, N)
    for number in tl.range(tl.program_id(0), across_m * across_n, tl.num_programs(0)):
        row, column = place(number, across_m, across_n, GROUP=8)
        rows = tl.minimum(row * M + tl.arange(0, M), m - 1).to(tl.int64)
        z = tl.zeros([M, N], tl.float32)
        mean = tl.zeros([M], tl.float32)
        square = tl.zeros([M], tl.float32)
        for step in range(tl.cdiv(k, K)):
            inner = step * K + tl.arange(0, K)[None, :]
            again = tl.load(x_ptr + rows[:, None] * x_stride + inner, mask=inner < inside, other=0.0)
            x = x_desc.load([row * M, step * K])
            w = w_desc.load([column * N, step * K])
            z = tl.dot(x, w.T, z)
            wide = again.to(tl.float32)
            mean += tl.sum(wide, axis=1)
            square += tl.sum(wide * wide, axis=1)
        whole = mean
        mean /= k
        variance = tl.maximum(square / k - mean * mean, 0.0)
        if tl.max(mean * mean - LARGE_MEAN * LARGE_MEAN * variance, axis=0) > 0.0:
            z = tl.zeros([M, N], tl.float32)
            square = tl.zeros([M], tl.float32)
            left = tl.zeros([M], tl.float32)  # remainder of the mean, which rounding loses where it is small
            for step in tl.range(0, tl.cdiv(k, K), num_stages=1):
                x = x_desc.load([row * M, step * K]).to(tl.float32) - mean[:, None]
                x = tl.where(step * K + tl.arange(0, K)[None, :] < k, x, 0.0)
                square += tl.sum(x * x, axis=1)
                rounded = x.to(y_desc.dtype)
                left += tl.sum(rounded.to(tl.float32), axis=1)
                z = tl.dot(rounded, w_desc.load([column * N, step * K]).T, z)
            variance = square / k
            mean = left / k
        scale = 1.0 / tl.sqrt(variance + tl.cast(eps, tl.float32))
        columns = column * N + tl.arange(0, N)
        total = tl.load(sum_ptr + columns, mask=columns < n, other=0.0)
        offset = tl.load(offset_ptr + columns, mask=columns < n, other=0.0)
        if tl.max(tl.where(tl.abs(total) < INFINITE, 0, 1), axis=0) > 0:
            mean = tl.div_rn(whole, tl.full([M], k, tl.float32))  # x may be as near it as float32 can tell
            z = unfolded(
                x_ptr, w_ptr, gamma_ptr, beta_ptr, rows, columns, mean, scale, n, k, x_stride, w_stride, M, N, STEP=32
            )
            mean, scale = tl.zeros([M], tl.float32), tl.full([M], 1.0, tl.float32)
            total = tl.zeros([N], tl.float32)
            offset = total
            if bias_ptr is not None:
                offset = tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)
        y = (z - mean[:, None] * total[None, :]) * scale[:, None] + offset[None, :]
        y_desc.store([row * M, column * N], y.to(y_desc.dtype))


def by_tiles(
    tiling: Tiling,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """The result, m × n.

    x, weight:    m × k and n × k, of which `tilings` has this tiling
    gamma, beta:  k, or None
    bias:         n, or None
    """
    n, k = weight.shape
    folded, (total, offset) = weight.new_empty(n, k), weight.new_empty(2, n, dtype=torch.float32)
    block = min(power_of_two(k), 4096)
    given = (weight, *(contiguous(parameter) for parameter in (gamma, beta, bias)))
    launch(layernorm_linear_fold, n, *given, folded, total, offset, k, weight.stride(0), BLOCK=block)
    y = x.new_empty(x.shape[0], n)
    settings = {"x_stride": x.stride(0), "w_stride": weight.stride(0), "eps": eps}
    launch_gemm(layernorm_linear_forward, tiling, x, folded, y, x, total, offset, *given, **settings)
    return y
