"""The gradients of LayerNorm: both sums over a row from one read of it, and sums over columns in a fixed order."""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from optexp.kernelkit.elementwise import FEW, add_up, begin, from_last, left, sharing, wide
from optexp.kernelkit.kernel import ceil_div, contiguous, multiprocessors, power_of_two
from optexp.kernelkit.launching import launch
from optexp.kernelkit.rows import Launch
from optexp.kernelkit.tuning import bucket, fastest


@triton.jit
def gradient(g, normal, scale, columns):
    """(g − mean(g) − x̂·mean(g·x̂))·scale of whole rows."""
    mean_g, mean_gn = tl.split(tl.sum(tl.join(g, g * normal), axis=1, keep_dims=True) / columns)
    return g * scale - mean_g * scale - normal * (mean_gn * scale)


@triton.jit
def layernorm_backward(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, scale_ptr, dx_ptr, sums_ptr, rows, columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """dx, and for each program the sums over its rows that weight (dy·x̂) and bias (dy) get.

    dx is the `gradient` of g = dy·weight.
    """
    begin(PDL, LETS_NEXT=False, LETS_SUMS=BLOCK <= 1024)  # registers then have room for what adds them up
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCK)[None, :]
    dtype = sums_ptr.dtype.element_ty
    to_weight = tl.zeros([ROWS, BLOCK], dtype)
    to_bias = tl.zeros([ROWS, BLOCK], dtype)
    if weight_ptr is not None:
        weight = tl.load(weight_ptr + column, mask=column < columns, other=0.0)
    for tile in tl.range(tl.program_id(0), (rows - 1) // ROWS + 1, tl.num_programs(0), num_stages=STAGES):
        first = from_last(tile, rows, ROWS)
        start = first * columns
        exists = row < left(first, rows, ROWS)
        mask = (column < columns) & exists
        x = tl.load(x_ptr + start + row * columns + column, mask=mask, other=0.0).to(dtype)
        dy = tl.load(dy_ptr + start + row * columns + column, mask=mask, other=0.0).to(dtype)
        scale = tl.load(scale_ptr + first + row, mask=exists, other=0.0)
        normal = (x - tl.load(mean_ptr + first + row, mask=exists, other=0.0)) * scale
        if not WHOLE:
            normal = tl.where(mask, normal, 0.0)
        g = dy
        if weight_ptr is not None:
            g *= weight.to(dtype)
        dx = gradient(g, normal, scale, columns)
        tl.store(dx_ptr + start + row * columns + column, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        to_weight += dy * normal
        to_bias += dy
    if PDL and BLOCK > 1024:  # else now
        gdc_launch_dependents()
    column = tl.arange(0, BLOCK)
    sums_ptr += tl.program_id(0) * 2 * columns
    tl.store(sums_ptr + column, tl.sum(to_weight, axis=0), mask=column < columns)
    tl.store(sums_ptr + columns + column, tl.sum(to_bias, axis=0), mask=column < columns)


@triton.jit
def layernorm_backward_row(dy_ptr, x_ptr, weight_ptr, mean_ptr, scale_ptr, dx_ptr, row, columns, WHOLE: tl.constexpr):
    """dx of a row."""
    dtype = mean_ptr.dtype.element_ty
    first, column = row * columns, tl.arange(0, WHOLE)[None, :]
    inside = column < columns
    scale = tl.load(scale_ptr + row)
    x = tl.load(x_ptr + first + column, mask=inside, other=0.0).to(dtype)
    g = tl.load(dy_ptr + first + column, mask=inside, other=0.0).to(dtype)
    if weight_ptr is not None:
        g *= tl.load(weight_ptr + column, mask=inside, other=0.0).to(dtype)
    normal = tl.where(inside, (x - tl.load(mean_ptr + row)) * scale, 0.0)
    dx = gradient(g, normal, scale, columns)
    tl.store(dx_ptr + first + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@triton.jit
def layernorm_backward_columns(
    dy_ptr, x_ptr, mean_ptr, scale_ptr, to_weight_ptr, to_bias_ptr, block, rows, columns,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradients of weight and bias, of a block of columns."""
    dtype = mean_ptr.dtype.element_ty
    column = block * BLOCK + tl.arange(0, BLOCK)
    to_weight = tl.zeros([ROWS, BLOCK], dtype)
    to_bias = tl.zeros([ROWS, BLOCK], dtype)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        exists = row < rows
        offsets, mask = row * columns + column[None, :], exists & (column[None, :] < columns)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0).to(dtype)
        dy = tl.load(dy_ptr + offsets, mask=mask, other=0.0).to(dtype)
        scale = tl.load(scale_ptr + row, mask=exists, other=0.0)
        to_weight += dy * ((x - tl.load(mean_ptr + row, mask=exists, other=0.0)) * scale)
        to_bias += dy
    weighted, plain = tl.sum(to_weight, axis=0), tl.sum(to_bias, axis=0)
    tl.store(to_weight_ptr + column, weighted.to(to_weight_ptr.dtype.element_ty), mask=column < columns)
    tl.store(to_bias_ptr + column, plain.to(to_bias_ptr.dtype.element_ty), mask=column < columns)


@triton.jit
def sum_over_rows(dz_ptr, sums_ptr, block, rows, columns, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums over rows of dz, of a block of columns."""
    column = block * BLOCK + tl.arange(0, BLOCK)
    sums = wide(tl.zeros([ROWS, BLOCK], dz_ptr.dtype.element_ty))
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)[:, None]
        mask = (row < rows) & (column[None, :] < columns)
        sums += wide(tl.load(dz_ptr + row * columns + column[None, :], mask=mask, other=0.0))
    total = tl.sum(sums, axis=0).to(sums_ptr.dtype.element_ty)
    tl.store(sums_ptr + column, total, mask=column < columns)


@triton.jit
def layernorm_backward_few(
    dy_ptr, x_ptr, weight_ptr, mean_ptr, scale_ptr, dx_ptr, to_weight_ptr, to_bias_ptr, rows, columns,
    dz_ptr, sums_ptr, outputs, WHOLE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All gradients of few rows in one launch: a program for each row, and one for each few columns of all rows.

    Further programs sum columns of dz, a matrix of as many rows, where it is given.
    """
    begin(PDL)
    program = tl.program_id(0)
    block = program - rows
    across = tl.cdiv(columns, BLOCK)
    if program < rows:
        layernorm_backward_row(dy_ptr, x_ptr, weight_ptr, mean_ptr, scale_ptr, dx_ptr, program, columns, WHOLE)
    elif block < across:
        layernorm_backward_columns(
            dy_ptr, x_ptr, mean_ptr, scale_ptr, to_weight_ptr, to_bias_ptr, block, rows, columns, ROWS, BLOCK
        )
    elif dz_ptr is not None:
        sum_over_rows(dz_ptr, sums_ptr, block - across, rows, outputs, ROWS, BLOCK)


def backward_of_rows(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, columns: int, bias: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the gradients of weight and bias as vectors of `columns` elements.

    dy, x:        of one shape, in rows of `columns` elements
    weight:       of `columns` elements, or None
    mean, scale:  mean and 1/deviation of every row
    bias:         the dtype of the bias; None: there is none
    """
    dy, x, weight = dy.contiguous(), x.contiguous(), contiguous(weight)
    dx, dweight, dbias = results = fake_gradients(dy, x, weight, mean, scale, columns, bias)
    rows, block = mean.numel(), max(power_of_two(columns), 16)

    def run(config: Launch | str) -> None:
        if not isinstance(config, Launch):
            backward_of_few(dy, x, weight, mean, scale, results)
            return
        everywhere = multiprocessors(x.device)
        programs = sharing(ceil_div(rows, config.rows), config.resident * everywhere, everywhere)
        sums = mean.new_empty((programs, 2, columns))
        tile = {**config.constants(block), "WHOLE": block == columns}
        launch(layernorm_backward, programs, dy, x, weight, mean, scale, dx, sums, rows, columns, **tile)
        add_up(sums, dweight, dbias)

    key = (dy.dtype, x.dtype, None if weight is None else weight.dtype, columns, bucket(rows))
    configs: list[Launch | str] = [*(["few rows"] if rows <= FEW else []), *_configs(block)]
    run(fastest("layernorm_backward", key, configs, run, x.device))
    return dx, dweight, dbias


def backward_of_few(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    scale: Tensor,
    results: tuple[Tensor, Tensor, Tensor],
    dz: Tensor | None = None,
    sums: Tensor | None = None,
) -> None:
    """Write the gradients of few rows in one launch, which also sums `dz` over its rows.

    results:  dx and the gradients of weight and bias
    dz:       rows × n, or None
    sums:     n, or None
    """
    (_, dweight, _), rows = results, mean.numel()
    columns, outputs = dweight.numel(), 0 if sums is None else sums.numel()
    how = _few_rows(rows, max(power_of_two(columns), 16), x.element_size())
    programs = rows + ceil_div(columns, how["BLOCK"]) + ceil_div(outputs, how["BLOCK"])
    operands = (contiguous(tensor) for tensor in (dy, x, weight))
    more = (contiguous(dz), sums, outputs)
    launch(layernorm_backward_few, programs, *operands, mean, scale, *results, rows, columns, *more, **how)


def _few_rows(rows: int, block: int, element_size: int) -> dict[str, int]:
    """The constexprs of `layernorm_backward_few`: programs of columns read ROWS × BLOCK elements at once;
    programs of rows hold a row in registers."""
    if block > 4096:
        together, width, warps = 128, max(64 // element_size, 16), 16
    elif rows > 128:
        together, width, warps = 128, 16, 8
    else:
        together, width, warps = 32, 16, 4
    return {"WHOLE": block, "ROWS": min(power_of_two(rows), together), "BLOCK": width, "num_warps": warps}


@cache
def _configs(block: int) -> list[Launch]:
    """Each program writes its sums: few programs write little, and must have more on its way at once.

    As many programs as stand here fit at once: else the last would run without company.
    """
    if block <= 1024:
        one = 1024 // block
        few = [Launch(4 * one, 4, 1, stages) for stages in (3, 4, 5)]
        few += [Launch(8 * one, 8, 1, 3), Launch(8 * one, 16, 1)]
        halves = [Launch(2 * one, 4, resident, stages) for resident, stages in ((1, 6), (2, 4), (3, 3), (4, 3))]
        return [Launch(4 * one, 4, 2, 3), *few, *halves, Launch(one, 4, 4, 4)]
    warps = min(max(block // 512, 4), 32)
    programs = max(1, 16 // warps)
    few = [Launch(more // warps, more, 16 // more, 3) for more in (8, 16) if more > warps]
    ahead = [Launch(1, warps, programs, stages) for stages in (3, 4)]
    return [Launch(1, warps, programs), *ahead, Launch(1, 32, 1, 3), *few]


def fake_gradients(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, scale: Tensor, columns: int, bias: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    dweight = (mean if weight is None else weight).new_empty(columns)
    return x.new_empty(x.shape), dweight, mean.new_empty(columns, dtype=bias)
