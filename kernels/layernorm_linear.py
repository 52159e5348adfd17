"""LayerNorm and the linear layer after it as one GEMM: normalised rows are never written.

With r = 1/deviation and μ the mean of a row, γ and β the norm's parameters:

    y = r·(x·(γ⊙w)ᵀ) − r·μ·Σ(γ⊙w) + (w·β + bias)

The sum over γ⊙w is taken of the rounded values that the GEMM sees, so that the mean cancels exactly; what the
accumulators lose to a mean that is large beside the deviation, does not: such tiles are done again from centred rows.

Where a weight, or a parameter of the norm, is infinite, so are these sums, and infinities would cancel that do not in
the norm and the GEMM one after the other: such tiles are made again as those are, of normalised rows and w itself.

Folding reads and writes all of w. Not on Hopper, where γ goes to x on its way into the GEMM (`hopper_gemm.cu`):
w is only summed over. Of few rows, blocks there normalise what they multiply (`few_rows_gemm.cu`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from optexp.kernelkit import extension, hopper
from optexp.kernelkit.capability import WGMMA
from optexp.kernelkit.elementwise import FEW as FEW_SUMMED
from optexp.kernelkit.elementwise import begin, from_last, share, summed, tile
from optexp.kernelkit.gemm import TILINGS, Tiling, in_rows, in_shape, launch_gemm, multiply, place, takes
from optexp.kernelkit.kernel import (
    REFUSED,
    Case,
    Fill,
    Kernel,
    ceil_div,
    contiguous,
    derived,
    is_differentiated,
    lowered,
    multiprocessors,
    needs_gradient,
    operation,
    pays,
    power_of_two,
)
from optexp.kernelkit.launching import launch
from optexp.kernelkit.tuning import bucket, fastest
from optexp.kernels.layernorm import (
    LONGEST,
    as_shape,
    backward_of_few,
    backward_of_rows,
    check_norm,
    fake_gradients,
    forward_of_rows,
    layernorm_gradients,
    normalised_rows,
)
from optexp.kernels.linear_gelu import HOPPER_GEMM, check_linear, is_small_gemm

SOURCE = extension.Source("layernorm_linear")
FEW_ROWS_GEMM = extension.Source("few_rows_gemm", needs=WGMMA)
FEW, SHORT = 512, 2048  # rows and columns up to which few_rows_gemm.cu is asked

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
            left = tl.zeros([M], tl.float32)  # of the mean: a small one can be rounded away again
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


@triton.jit
def bias_gradient(
    dy_ptr, sums_ptr, rows, columns,
    WIDE: tl.constexpr, ALONE: tl.constexpr, STAGES: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """For each group of rows their sum."""
    begin(PDL, LETS_NEXT=ALONE and STAGES == 1, LETS_SUMS=not ALONE)
    block, group, count = share(columns, ALONE, BLOCK)
    sums = tl.zeros([ROWS, BLOCK], WIDE)
    for number in tl.range(group, (rows - 1) // ROWS + 1, count, num_stages=STAGES):
        start, offsets, mask, _ = tile(from_last(number, rows, ROWS), block, rows, columns, ROWS, BLOCK)
        sums += tl.load(dy_ptr + start + offsets, mask=mask, other=0.0).to(WIDE)
    column = block * BLOCK + tl.arange(0, BLOCK)
    total = tl.sum(sums, axis=0).to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + group * columns + column, total, mask=column < columns)


@triton.jit
def layernorm_linear_plain(
    x_ptr, gamma_ptr, beta_ptr, w_ptr, bias_ptr, y_ptr, columns, outputs, eps,
    OUTPUTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Some outputs of one row a program, which normalises the row for itself."""
    row, block = tl.program_id(0) // tl.cdiv(outputs, OUTPUTS), tl.program_id(0) % tl.cdiv(outputs, OUTPUTS)
    inner, output = tl.arange(0, BLOCK), block * OUTPUTS + tl.arange(0, OUTPUTS)
    inside = inner < columns
    x = tl.load(x_ptr + row * columns + inner, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, x - tl.sum(x, axis=0) / columns, 0.0)
    normal = centred / tl.sqrt(tl.sum(centred * centred, axis=0) / columns + eps)
    normal = normal * tl.load(gamma_ptr + inner, mask=inside, other=0.0)
    normal += tl.load(beta_ptr + inner, mask=inside, other=0.0)
    mask = (output < outputs)[:, None] & inside[None, :]
    w = tl.load(w_ptr + output[:, None] * columns + inner[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.sum(w * normal[None, :], axis=1) + tl.load(bias_ptr + output, mask=output < outputs, other=0.0)
    tl.store(y_ptr + row * outputs + output, y, mask=output < outputs)


def _computed(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, ...]:
    """The result; and where they are to be saved the normalised rows, their means and 1/deviations."""
    rows = in_rows(x)
    count, columns = rows.shape

    def run(config: Tiling | str) -> tuple[Tensor, ...]:
        operands = (rows, gamma, beta, weight, bias, eps)
        if isinstance(config, Tiling):
            return (by_tiles(config, *operands),)
        if config == "hopper":
            return (by_hopper(*operands),)
        if config == "few":
            return (by_few(*operands),)
        norm = forward_of_rows if save else normalised_rows
        normal, *statistics = norm(rows, gamma, beta, columns, eps, weight.dtype)
        y = multiply(normal, weight, bias)
        return (y, normal, *statistics) if save else (y,)

    configs: list[Tiling | str] = ["library"]
    if not save and columns % 8 == 0 and takes(rows, weight):
        # Of float16, γ⊙w or γ⊙x could overflow, or lose bits below its smallest normal number.
        if weight.dtype == torch.bfloat16:
            configs += TILINGS
            if hopper.takes(HOPPER_GEMM, rows, gamma, beta, bias):
                configs.append("hopper")
        if count <= FEW and columns <= SHORT and hopper.takes(FEW_ROWS_GEMM, rows, gamma, beta, bias):
            # First, as where nothing can be raced, if all its blocks run at once: of small calls only graphs come here.
            configs.insert(
                0 if few_blocks(count, weight.shape[0]) <= multiprocessors(x.device) else len(configs), "few"
            )
    # Each 32 rows that are few may be more tiles, which may or may not be made at once.
    size = f"{ceil_div(count, 32)} times 32" if count <= FEW else bucket(count)
    key = (x.dtype, weight.dtype, save, gamma is None, size, *weight.shape)
    y, *saved = run(fastest("layernorm_linear", key, configs, run, x.device))
    return in_shape(y, x), *saved


def _forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same with empty tensors for what is not saved."""
    y, *saved = _computed(x, gamma, beta, weight, bias, eps, save)
    normal, mean, scale = saved or (x.new_empty(0) for _ in range(3))
    return y, normal, mean, scale


def by_tiles(
    tiling: Tiling,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    """By our own GEMM, of matrices that it takes."""
    n, k = weight.shape
    folded, (total, offset) = weight.new_empty(n, k), weight.new_empty(2, n, dtype=torch.float32)
    block = min(power_of_two(k), 4096)
    given = (weight, *(contiguous(parameter) for parameter in (gamma, beta, bias)))
    launch(layernorm_linear_fold, n, *given, folded, total, offset, k, weight.stride(0), BLOCK=block)
    y = x.new_empty(x.shape[0], n)
    settings = {"x_stride": x.stride(0), "w_stride": weight.stride(0), "eps": eps}
    launch_gemm(layernorm_linear_forward, tiling, x, folded, y, x, total, offset, *given, **settings)
    return y


def by_hopper(
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    beside: bool | None = None,
    apart: bool | None = None,
    max_polls: int = 1000,
) -> Tensor:
    """In CUDA C++, of matrices that `hopper.takes`: x goes through registers there, where γ is multiplied to it, and
    mean and deviation are summed beside the GEMM. Whoever sums first, the bits are the same.

    beside:    whether some blocks sum over w beside the GEMM, and no kernel before it; None: where they have time
    apart:     whether warps that multiply nothing sum over x, in an order of their own, of up to 32768 rows; None:
               where they keep up
    max_polls:  how often a block looks for what another sums before it does so itself; 0: never
    """
    (m, k), n = x.shape, weight.shape[0]
    columns = weight.new_empty(ceil_div(n, 256) * 256, 4)  # of all that tiles have
    y = x.new_empty(m, n)
    parameters = (0 if p is None else p for p in (gamma, beta, weight, bias))
    choices = (-1 if choice is None else choice for choice in (beside, apart))
    sizes = (m, n, k, x.stride(0), weight.stride(0), eps, *choices, max_polls)
    HOPPER_GEMM.run("layernorm_linear", x, *parameters, columns, y, *sizes)
    return y


def few_blocks(rows: int, outputs: int) -> int:
    """Of `by_few`."""
    return 2 * ceil_div(rows, 32) * ceil_div(outputs, 64)


def by_few(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float
) -> Tensor:
    """In CUDA C++, of matrices that `hopper.takes`, of up to SHORT columns, in one launch."""
    (m, k), n = x.shape, weight.shape[0]
    y = x.new_empty(m, n)
    parameters = (0 if p is None else p for p in (gamma, beta, weight, bias))
    sizes = (m, n, k, x.stride(0), weight.stride(0), eps, x.dtype)
    FEW_ROWS_GEMM.run("layernorm_linear", x, *parameters, y, *sizes)
    return y


def _cuda_forward(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The norm in CUDA C++, the GEMM by the library."""
    rows = in_rows(x).contiguous()
    normal = weight.new_empty(rows.shape)
    mean = x.new_empty(len(rows), dtype=torch.float32)
    scale = torch.empty_like(mean)
    if rows.numel():
        given = [p for p in (gamma, beta) if p is not None]
        dtype = x.dtype if all(p.dtype == x.dtype for p in given) else torch.float32
        parameters = (0 if p is None else p.to(dtype).contiguous() for p in (gamma, beta))
        sizes = (*rows.shape, eps, dtype, weight.dtype, x.dtype)
        SOURCE.run("forward", rows, *parameters, normal, mean, scale, *sizes)
    y = in_shape(F.linear(normal, weight, bias), x)
    return (y, normal, mean, scale) if save else (y, x.new_empty(0), x.new_empty(0), x.new_empty(0))


def _fake(
    x: Tensor, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, save: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    y = weight.new_empty(*x.shape[:-1], weight.shape[0])
    if not save:
        return y, x.new_empty(0), x.new_empty(0), x.new_empty(0)
    rows = x.numel() // x.shape[-1]
    mean = x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))
    return y, weight.new_empty(rows, x.shape[-1]), mean, torch.empty_like(mean)


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    columns: int,
    bias: torch.dtype | None,
    dz: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Those of the norm, and the sums over rows of dz, the GEMM's: of few rows maybe in one launch."""

    rows, outputs = dz.shape

    def run(config: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        if config == "apart":
            results = backward_of_rows(dy, x, weight, mean, scale, columns, bias)
            return *results, summed(bias_gradient, dz.dtype, dz.contiguous())
        results, sums = fake_gradients(dy, x, weight, mean, scale, columns, bias), dz.new_empty(outputs)
        backward_of_few(dy, x, weight, mean, scale, results, dz, sums)
        return *results, sums

    configs = ["together", "apart"] if rows <= FEW_SUMMED and dz.numel() < 2**31 else ["apart"]
    dtypes = (dy.dtype, x.dtype, None if weight is None else weight.dtype, dz.dtype)
    key = (*dtypes, columns, outputs, bucket(rows))
    return run(fastest("layernorm_linear_backward", key, configs, run, x.device))


def _fake_gradients(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    *to_norm, dz = args
    return *fake_gradients(*to_norm), dz.new_empty(dz.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, gamma, beta, weight, bias, ctx.eps, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, gamma, beta, weight, bias, *output[1:])


def _differentiate(ctx: Any, dy: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 7
    x, gamma, beta, weight, bias, normal, mean, scale = ctx.saved_tensors
    if is_differentiated(dy):  # and what was saved depends on x

        def plainly(x: Tensor, gamma: Tensor, beta: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
            normal = F.layer_norm(x, x.shape[-1:], gamma, beta, ctx.eps)
            return F.linear(normal.to(weight.dtype), weight, bias)

        return *derived(plainly, [x, gamma, beta, weight, bias], dy), None, None
    arrived, dbias = in_rows(dy), None
    to_norm = (multiply(arrived, weight.T), x, gamma, mean, scale, x.shape[-1], None if beta is None else beta.dtype)
    if ctx.needs_input_grad[4]:
        dx, dgamma, dbeta, dbias = all_gradients(*to_norm, arrived)
    else:
        dx, dgamma, dbeta = layernorm_gradients(*to_norm)
    dweight = multiply(arrived.T, normal.T) if ctx.needs_input_grad[3] else None
    return dx, None if gamma is None else dgamma, None if beta is None else dbeta, dweight, dbias, None, None


all_gradients = operation("layernorm_linear_backward", _gradients, _fake_gradients)
_layernorm_linear = operation("layernorm_linear", _forward, _fake, _save, _differentiate, inference=_computed)
_layernorm_linear_cuda = operation("layernorm_linear_cuda", _cuda_forward, _fake, _save, _differentiate)


def layernorm_linear(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.linear(F.layer_norm(x, normalized_shape, gamma, beta, eps), weight, bias), over the last dimension.

    A shape on which the norm and a library's GEMM are faster, one after the other, is given to those. In float32
    they always are one after the other, and the GEMM may be three of TF32 (see `multiply`).
    """
    one = isinstance(normalized_shape, int) or len(normalized_shape) == 1  # dimension, where torch would take several
    if one and is_small_gemm(x, weight, bias, _operations):
        try:
            return F.linear(torch.layer_norm(x, as_shape(normalized_shape), gamma, beta, eps), weight, bias)
        except REFUSED:
            pass  # for a reason that the checks will tell
    check_arguments(x, normalized_shape, gamma, beta, weight, bias)
    if not worthwhile(x, normalized_shape, gamma, beta, weight):
        return reference(x, normalized_shape, gamma, beta, weight, bias, eps)
    args = (x, gamma, beta, *lowered(weight, bias))
    y: Tensor = _layernorm_linear(*args, float(eps), needs_gradient(args))[0]
    return y


def worthwhile(
    x: Tensor, normalized_shape: Any, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, *_: Any
) -> bool:
    """Whether it can pay. A GEMM costs as much as an element-wise operation for each 128 of its outputs, and a call
    of ours the host as much as four of others."""
    return pays(x, _operations(weight)) and 0 < x.shape[-1] <= LONGEST


def _operations(weight: Tensor) -> float:
    return (1 + weight.shape[0] / 128) / 4


def cuda(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """The same with the norm in CUDA C++, and its gradient in Triton."""
    columns = check_arguments(x, normalized_shape, gamma, beta, weight, bias)
    lower_weight, lower_bias = lowered(weight, bias)
    assert lower_weight is not None
    if not (extension.takes(x) and extension.takes(lower_weight)) or not 0 < columns <= LONGEST:
        return reference(x, normalized_shape, gamma, beta, weight, bias, eps)
    args = (x, gamma, beta, lower_weight, lower_bias)
    y: Tensor = _layernorm_linear_cuda(*args, float(eps), needs_gradient(args))[0]
    return y


def check_arguments(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> int:
    """How many elements are normalised together; ValueError where the shapes do not fit."""
    columns = check_norm("layernorm_linear", x, normalized_shape, gamma, beta)
    check_linear("layernorm_linear", x, weight, bias)
    if columns != x.shape[-1]:
        raise ValueError(
            f"layernorm_linear normalises the last dimension, and was given {list(as_shape(normalized_shape))}"
        )
    return columns


def reference(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return F.linear(F.layer_norm(x, as_shape(normalized_shape), gamma, beta, eps), weight, bias)


def plain(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    gamma: Tensor,
    beta: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """Of contiguous matrices, without tensor cores."""
    (rows, columns), outputs = x.shape, weight.shape[0]
    y, block = x.new_empty(rows, outputs), power_of_two(columns)
    operands = (x, gamma, beta, weight, bias, y, columns, outputs, eps)
    launch(layernorm_linear_plain, rows * ceil_div(outputs, 16), *operands, OUTPUTS=16, BLOCK=block)
    return y


def cuda_plain(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    gamma: Tensor,
    beta: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
) -> Tensor:
    """The same in CUDA C++: a block normalises a row, and each of its threads makes outputs of its own."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    operands = (x, gamma.float(), beta.float(), weight, bias, y)
    SOURCE.run("plain", *operands, *x.shape, weight.shape[0], float(eps), x.dtype)
    return y


class LayerNormLinear(nn.Sequential):
    """nn.LayerNorm and the nn.Linear after it: `LayerNormLinear(nn.LayerNorm(n), nn.Linear(n, m))`."""

    def __init__(self, norm: nn.LayerNorm, linear: nn.Linear) -> None:
        super().__init__(norm, linear)

    def forward(self, x: Tensor) -> Tensor:
        norm, linear = self
        assert isinstance(norm, nn.LayerNorm)
        assert isinstance(linear, nn.Linear)
        return layernorm_linear(x, norm.normalized_shape, norm.weight, norm.bias, linear.weight, linear.bias, norm.eps)


def _arguments(rows: int, features: int, out: int) -> Callable[[Fill], tuple[Any, ...]]:
    def of(fill: Fill) -> tuple[Any, ...]:
        gamma, beta = fill(features) / 8 + 1, fill(features) / 8
        return fill(rows, features), (features,), gamma, beta, fill(out, features) / features**0.5, fill(out)

    return of


KERNEL = Kernel(
    function=layernorm_linear,
    reference=reference,
    plain=plain,
    cuda=cuda,
    sources=[SOURCE, HOPPER_GEMM, FEW_ROWS_GEMM],
    cases=[
        Case("tail", _arguments(37, 72, 88)),
        Case("divisible by nothing", _arguments(7, 13, 11)),
        Case("one row", _arguments(1, 128, 64)),
        Case("a vector", lambda fill: _arguments(1, 13, 11)(lambda *shape: fill(*shape).squeeze(0))),
        Case("of nothing", lambda fill: (fill(4, 0), 0, fill(0), fill(0), fill(5, 0), fill(5), 1)),
        Case("no norm parameters", lambda fill: (fill(3, 5, 64), (64,), None, None, fill(40, 64) / 8, fill(40))),
        Case("no bias", lambda fill: (fill(9, 64), (64,), fill(64), None, fill(40, 64) / 8, None, 1)),
        Case("a large mean", lambda fill: (fill(37, 72) + 40, *_arguments(37, 72, 88)(fill)[1:])),
    ],
    large=Case("large", _arguments(2**21 + 1, 1032, 64)),
    invalid_cases=[
        Case("another shape", lambda fill: (fill(4, 3), (4,), None, None, fill(5, 3))),
        Case("two dimensions", lambda fill: (fill(4, 3), (4, 3), None, None, fill(5, 3))),
        Case("sizes that do not fit", lambda fill: (fill(4, 3), (3,), None, None, fill(5, 4))),
        Case("a norm of another size", lambda fill: (fill(4, 3), (3,), fill(4), None, fill(5, 3))),
        Case("two dtypes", lambda fill: (fill(4, 3), (3,), None, None, fill(5, 3).half())),
    ],
    benchmarks=[
        Case("16384×1024→1024", _arguments(16384, 1024, 1024), goal=1.10),
        Case("4096×1024→4096", _arguments(4096, 1024, 4096), goal=1.04),
        Case("8192×4096→4096", _arguments(8192, 4096, 4096), goal=1.03),
        Case("128×1024→1024", _arguments(128, 1024, 1024), goal=1.10),
    ],
    sweep=lambda fill, size: _arguments(max(size // 1024, 1), 1024, 1024)(fill),
    patterns=[
        lambda x, normalized_shape, gamma, beta, eps, weight, bias: F.linear(
            F.layer_norm(x, normalized_shape, gamma, beta, eps), weight, bias
        ),
    ],
    worthwhile=worthwhile,
    lower_bound=lambda x, normalized_shape, gamma, beta, weight, bias: F.linear(x, weight, bias),
)
