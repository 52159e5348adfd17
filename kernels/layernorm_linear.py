"""LayerNorm and the linear layer after it as one GEMM: normalised rows are never written.

Three implementations beside the library's are raced: a Triton GEMM with folded weights (`_layernorm_linear_folded`),
and on Hopper two in CUDA C++ (`_layernorm_linear_cuda`).
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
from optexp.kernelkit.elementwise import FEW as FEW_SUMMED
from optexp.kernelkit.elementwise import begin, from_last, share, summed, tile
from optexp.kernelkit.gemm import TILINGS, Tiling, in_rows, in_shape, multiply, takes
from optexp.kernelkit.kernel import (
    REFUSED,
    Case,
    Fill,
    Kernel,
    ceil_div,
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
from optexp.kernels._layernorm_gradients import backward_of_few, backward_of_rows, fake_gradients
from optexp.kernels._layernorm_linear_cuda import (
    FEW_ROWS_GEMM,
    SOURCE,
    by_few,
    by_hopper,
    few_blocks,
    norm_then_library,
)
from optexp.kernels._layernorm_linear_folded import by_tiles
from optexp.kernels.layernorm import (
    LONGEST,
    as_shape,
    check_norm,
    forward_of_rows,
    layernorm_gradients,
    normalised_rows,
)
from optexp.kernels.linear_gelu import HOPPER_GEMM, check_linear, is_small_gemm

FEW, SHORT = 512, 2048  # most rows, most columns for few_rows_gemm.cu


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
    """The result y; with `save` also the normalised rows, their means and 1/deviations."""
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
    """y, normalised rows, means and 1/deviations; the last three are empty where nothing is saved."""
    y, *saved = _computed(x, gamma, beta, weight, bias, eps, save)
    normal, mean, scale = saved or (x.new_empty(0) for _ in range(3))
    return y, normal, mean, scale


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
    """The gradients of x, γ and β, and the sum over rows of dz (m × n): for few rows perhaps in one launch."""
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
_layernorm_linear_cuda = operation("layernorm_linear_cuda", norm_then_library, _fake, _save, _differentiate)


def layernorm_linear(
    x: Tensor,
    normalized_shape: int | Sequence[int],
    gamma: Tensor | None,
    beta: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """F.linear(F.layer_norm(x, normalized_shape, gamma, beta, eps), weight, bias), … × n.

    A shape on which the norm and a library's GEMM are faster, one after the other, goes to these. In float32 they
    always run one after the other, and the GEMM may be three TF32 GEMMs (see `multiply`).

    x:                 … × k
    normalized_shape:  k: the last dimension alone
    gamma, beta:       k, or None
    weight:            n × k
    bias:              n, or None

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; the message has the remedy.
    """
    one = isinstance(normalized_shape, int) or len(normalized_shape) == 1  # dimension, where torch would take several
    if one and is_small_gemm(x, weight, bias, _operations):
        try:
            return F.linear(torch.layer_norm(x, as_shape(normalized_shape), gamma, beta, eps), weight, bias)
        except REFUSED:
            pass  # the checks below name the reason
    check_arguments(x, normalized_shape, gamma, beta, weight, bias)
    if not worthwhile(x, normalized_shape, gamma, beta, weight):
        return reference(x, normalized_shape, gamma, beta, weight, bias, eps)
    args = (x, gamma, beta, *lowered(weight, bias))
    y: Tensor = _layernorm_linear(*args, float(eps), needs_gradient(args))[0]
    return y


def worthwhile(
    x: Tensor, normalized_shape: Any, gamma: Tensor | None, beta: Tensor | None, weight: Tensor, *_: Any
) -> bool:
    """True where the kernel can beat torch; arguments, fake tensors included, as of `layernorm_linear`.

    A GEMM costs as much as one element-wise operation for each 128 outputs; a call of ours costs the host as much as
    four calls of torch.
    """
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
    """`layernorm_linear` with the norm in CUDA C++, the library's GEMM, and the gradient in Triton."""
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
    """The number of elements that are normalised together.

    Raises:
        ValueError: The shapes do not fit.
    """
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
    """The textbook kernel, of contiguous matrices, without tensor cores."""
    (rows, columns), outputs = x.shape, weight.shape[0]
    y, block = x.new_empty(rows, outputs), power_of_two(columns)
    operands = (x, gamma, beta, weight, bias, y, columns, outputs, eps)
    launch(layernorm_linear_plain, rows * ceil_div(outputs, 16), *operands, OUTPUTS=16, BLOCK=block)
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
