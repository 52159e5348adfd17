"""gelu(x·wᵀ + bias): GELU in the GEMM's epilogue reads the accumulators, so z = x·wᵀ + bias is never written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.tools.tensor_descriptor import TensorDescriptor

from optexp.kernelkit import extension, hopper
from optexp.kernelkit.capability import WGMMA
from optexp.kernelkit.elementwise import over_columns
from optexp.kernelkit.gemm import (
    Tiling,
    in_rows,
    in_shape,
    launch_gemm,
    library_configs,
    multiply,
    place,
    takes,
    tilings,
)
from optexp.kernelkit.kernel import (
    REFUSED,
    Case,
    Kernel,
    ceil_div,
    check_tensors,
    contiguous,
    derived,
    is_differentiated,
    is_small,
    lowered,
    needs_gradient,
    operation,
    pays,
    runs_on,
)
from optexp.kernelkit.launching import launch
from optexp.kernelkit.tuning import bucket, fastest
from optexp.kernels.bias_gelu import bias_gelu, bias_gelu_backward
from optexp.kernels.gelu import cdf, check_form, gelu, gelu_forward
from optexp.kernels.relu_bias_scale import fake_backward

HOPPER_GEMM = extension.Source("hopper_gemm", needs=WGMMA)
CHUNKS = (2**24, 2**25)  # bytes, of L2's 50 MB

# Of cuBLASLt's epilogue, whose tanh is good to 6e-6: too little in float32, by the gates.
COARSE = (torch.bfloat16, torch.float16)


@triton.jit
def linear_gelu_forward(
    bias_ptr, z_desc, x_desc, w_desc, y_desc, m, n, k,
    TANH: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, FLATTEN: tl.constexpr,
):  # fmt: skip
    """Tiles of y, and of z = x·wᵀ + bias where backward will want it."""
    across_m, across_n = tl.cdiv(m, M), tl.cdiv(n, N)
    for tile in tl.range(tl.program_id(0), across_m * across_n, tl.num_programs(0), flatten=FLATTEN):
        row, column = place(tile, across_m, across_n, GROUP=8)
        z = tl.zeros([M, N], tl.float32)
        for step in range(tl.cdiv(k, K)):
            x = x_desc.load([row * M, step * K])
            w = w_desc.load([column * N, step * K])
            z = tl.dot(x, w.T, z, input_precision="tf32x3")
        if bias_ptr is not None:
            columns = column * N + tl.arange(0, N)
            z += tl.load(bias_ptr + columns, mask=columns < n, other=0.0).to(tl.float32)[None, :]
        if z_desc is not None:
            z_desc.store([row * M, column * N], z.to(y_desc.dtype))
        y_desc.store([row * M, column * N], (z * cdf(z, TANH)).to(y_desc.dtype))


@triton.jit
def linear_gelu_plain(
    x_ptr, w_ptr, bias_ptr, y_ptr, m, n, k, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """One tile a program, read through pointers, with the tanh form."""
    rows = tl.program_id(0) // tl.cdiv(n, N) * M + tl.arange(0, M)[:, None]
    columns = tl.program_id(0) % tl.cdiv(n, N) * N + tl.arange(0, N)[None, :]
    z = tl.zeros([M, N], tl.float32)
    for start in range(0, k, K):
        inner = start + tl.arange(0, K)
        x = tl.load(x_ptr + rows * k + inner[None, :], mask=(rows < m) & (inner[None, :] < k), other=0.0)
        w = tl.load(w_ptr + columns * k + inner[:, None], mask=(columns < n) & (inner[:, None] < k), other=0.0)
        z = tl.dot(x, w, z, input_precision="ieee")
    z += tl.load(bias_ptr + columns, mask=columns < n, other=0.0)
    tl.store(y_ptr + rows * n + columns, z * cdf(z, True), mask=(rows < m) & (columns < n))


def _forward(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, save: bool) -> tuple[Tensor, Tensor]:
    """The result, and z = x·wᵀ + bias where it is to be saved, else nothing."""
    rows = in_rows(x)

    def run(config: Tiling | int | str) -> tuple[Tensor, Tensor]:
        if isinstance(config, Tiling):
            return by_tiles(config, rows, weight, bias, approximate, save)
        if isinstance(config, int):
            return by_chunks(config, rows, weight, bias, approximate), x.new_empty(0)
        if config == "hopper":
            return by_hopper(rows, weight, bias, approximate), x.new_empty(0)
        if config == "addmm" and bias is not None:
            return torch._addmm_activation(bias, rows, weight.T, use_gelu=True), x.new_empty(0)
        if config == "apart" and bias is not None:
            z = rows @ weight.T
            if not save:
                return bias_gelu(z, bias, approximate), x.new_empty(0)
            z += bias
        else:
            z = F.linear(rows, weight, bias)
        return gelu(z, approximate), z if save else x.new_empty(0)

    configs: list[Tiling | int | str] = [*library_configs(len(rows), weight, bias)]
    # cuBLASLt's epilogue, which keeps no z: one launch less, also where nothing is raced. Of no columns it is the bias.
    if approximate == "tanh" and not save and bias is not None and x.is_cuda and x.dtype in COARSE and rows.shape[1]:
        configs.insert(0, "addmm")
    tiles = tilings(rows, weight)
    configs += tiles
    if not save and takes(rows, weight) and hopper.takes(HOPPER_GEMM, rows, bias):
        configs.append("hopper")
    if not save and not tiles:
        configs += chunks(rows.shape[0], weight.shape[0] * x.element_size())
    # With TF32, where the user allows it, the library's GEMM takes a third of its time.
    precision = torch.backends.cuda.matmul.fp32_precision if x.dtype == torch.float32 else ""
    key = (x.dtype, precision, approximate, save, bias is None, bucket(rows.shape[0]), *weight.shape)
    y, z = run(fastest("linear_gelu", key, configs, run, x.device))
    return in_shape(y, x), in_shape(z, x) if save else z


def by_tiles(
    tiling: Tiling, x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, save: bool
) -> tuple[Tensor, Tensor]:
    """The result, m × n, by the Triton GEMM, and z = x·wᵀ + bias where it is to be saved, else an empty tensor.

    x, weight:  m × k and n × k, of which `tilings` has this tiling
    """
    y = x.new_empty(x.shape[0], weight.shape[0])
    z = torch.empty_like(y) if save else x.new_empty(0)
    saved = TensorDescriptor.from_tensor(z, [tiling.m, tiling.n]) if save else None
    form = {"TANH": approximate == "tanh", "FLATTEN": tiling.resident > 0}
    launch_gemm(linear_gelu_forward, tiling, x, weight, y, contiguous(bias), saved, **form)
    return y, z


def chunks(rows: int, row_bytes: int) -> list[int]:
    """Row counts of chunks whose results stay in L2 and fill the card; `row_bytes` are those of a row of the result."""
    at_once = [size // max(row_bytes, 1) // 256 * 256 for size in CHUNKS]
    return [count for count in at_once if 0 < count < rows]


def by_chunks(rows: int, x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """The library's GEMM of so many rows at a time, each followed by GELU in place, in L2."""
    y = x.new_empty(x.shape[0], weight.shape[0])
    for some, z in zip(x.split(rows), y.split(rows), strict=True):
        if bias is None:
            torch.mm(some, weight.T, out=z)
        else:
            torch.addmm(bias, some, weight.T, out=z)
        block = 4096 // z.element_size()
        launch(gelu_forward, ceil_div(z.numel(), block), z, z, z.numel(), TANH=approximate == "tanh", BLOCK=block)
    return y


def by_hopper(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> Tensor:
    """The result, m × n, by CUDA C++: GELU of a tile runs beside the GEMM of the next.

    x, weight:  m × k and n × k that `hopper.takes`

    Raises:
        RuntimeError: The source does not compile, or the launch fails.
    """
    (m, k), n = x.shape, weight.shape[0]
    y = x.new_empty(m, n)
    sizes = (m, n, k, x.stride(0), weight.stride(0), approximate == "tanh", x.dtype)
    HOPPER_GEMM.run("linear_gelu", x, weight, 0 if bias is None else bias, y, *sizes)
    return y


def _fake(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str, save: bool) -> tuple[Tensor, Tensor]:
    y = x.new_empty(*x.shape[:-1], weight.shape[0])
    return y, torch.empty_like(y) if save else x.new_empty(0)


def _backward(dy: Tensor, z: Tensor, approximate: str, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The gradients of z and, in its dtype, of the bias."""
    operands, tanh = (dy.contiguous(), z, None), approximate == "tanh"
    return over_columns(bias_gelu_backward, z.new_empty(z.shape), dtype, *operands, TANH=tanh)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.approximate, _ = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, output[1])


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    x, weight, bias, z = ctx.saved_tensors
    if is_differentiated(dy):  # and z has forgotten what it came from
        return *derived(lambda x, w, b: reference(x, w, b, ctx.approximate), [x, weight, bias], dy), None, None
    dz, dbias = _linear_gelu_backward(dy, z, ctx.approximate, z.dtype if bias is None else bias.dtype)
    arrived = in_rows(dz)
    dx = in_shape(multiply(arrived, weight.T), x) if ctx.needs_input_grad[0] else None
    dw = multiply(arrived.T, in_rows(x).T) if ctx.needs_input_grad[1] else None
    return dx, dw, None if bias is None else dbias, None, None


_linear_gelu_backward = operation("linear_gelu_backward", _backward, fake_backward)
_linear_gelu = operation("linear_gelu", _forward, _fake, _save, _differentiate)


def linear_gelu(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    """gelu(F.linear(x, weight, bias)), … × n.

    A shape on which a library's GEMM is faster goes to the library. In float32 ours is three TF32 GEMMs, which together
    are about as exact as one float32 GEMM (see `tilings`).

    x:            … × k
    weight:       n × k
    bias:         n, or None
    approximate:  "none" (with erf) or "tanh"

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; the message has the remedy.
    """
    if is_small_gemm(x, weight, bias, _operations):
        try:
            return F.gelu(F.linear(x, weight, bias), approximate=approximate)
        except REFUSED:
            pass  # the checks below name the reason
    check_linear("linear_gelu", x, weight, bias)
    check_form("linear_gelu", approximate)
    if not runs_on(x.device) or not worthwhile(x, weight, bias, approximate):
        return reference(x, weight, bias, approximate)
    args = lowered(x, weight, bias)
    y: Tensor = _linear_gelu(*args, approximate, needs_gradient(args))[0]
    return y


def worthwhile(x: Tensor, weight: Tensor, bias: Tensor | None, approximate: str) -> bool:
    """True where the kernel can beat torch; arguments, fake tensors included, as of `linear_gelu`.

    For few elements only the number of launches counts. cuBLASLt's epilogue alone saves one, on the device; it costs
    the host as much as two launches.
    """
    coarse = x.dtype in COARSE or torch.is_autocast_enabled(x.device.type)
    alone = approximate == "tanh" and coarse and not needs_gradient((x, weight, bias))
    return pays(x, _operations(weight)) or alone


def _operations(weight: Tensor) -> float:
    """Elements of z that are written and read again, for each element of x."""
    outputs, inputs = weight.shape
    return 2 * outputs / max(inputs, 1)


def is_small_gemm(x: Any, weight: Any, bias: Any, operations: Callable[[Tensor], float]) -> bool:
    """`is_small` for F.linear; false for shapes that torch accepts and our checks refuse.

    operations:  operations for each element of x, from the weight
    """
    return (
        isinstance(weight, Tensor)
        and weight.dim() == 2
        and is_small(x, operations(weight))
        and (bias is None or (isinstance(bias, Tensor) and bias.shape == weight.shape[:1]))
    )


def check_linear(name: str, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Check that F.linear would take these: … × k, n × k, and n or None.

    Raises:
        ValueError: It would not.
    """
    check_tensors(name, x, weight, bias)
    if x.dim() < 1 or weight.dim() != 2 or x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"{name}: an input of shape {list(x.shape)} and a weight of shape {list(weight.shape)} do not fit:"
            " they need (..., in) and (out, in)"
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"{name}: the bias has shape {list(bias.shape)}, and must have {list(weight.shape[:1])}")
    dtypes = {tensor.dtype for tensor in (x, weight, bias) if tensor is not None}
    if len(dtypes) > 1 and not torch.is_autocast_enabled(x.device.type):
        names = " and ".join(sorted(map(str, dtypes)))
        raise ValueError(f"{name} was given tensors of {names}: convert them to one dtype, or use autocast")


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None, approximate: str = "none") -> Tensor:
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def plain(x: Tensor, weight: Tensor, bias: Tensor, approximate: str = "tanh") -> Tensor:
    """The textbook kernel in the tanh form, of contiguous matrices."""
    (m, k), n = x.shape, weight.shape[0]
    y = x.new_empty(m, n)
    launch(linear_gelu_plain, ceil_div(m, 64) * ceil_div(n, 64), x, weight, bias, y, m, n, k, M=64, N=64, K=32)
    return y


class LinearGELU(nn.Linear):
    """nn.Linear and the GELU after it."""

    def __init__(self, in_features: int, out_features: int, approximate: str = "none", **options: Any) -> None:
        super().__init__(in_features, out_features, **options)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return linear_gelu(x, self.weight, self.bias, self.approximate)


KERNEL = Kernel(
    function=linear_gelu,
    reference=reference,
    plain=plain,
    sources=[HOPPER_GEMM],
    cases=[
        Case("tail", lambda fill: (fill(37, 72), fill(88, 72) / 8, fill(88), "tanh")),
        Case("exact", lambda fill: (fill(37, 72), fill(88, 72) / 8, fill(88), "none")),
        Case("no bias", lambda fill: (fill(3, 5, 64), fill(40, 64) / 8, None, "tanh")),
        Case("divisible by nothing", lambda fill: (fill(7, 13), fill(11, 13) / 4, fill(11), "tanh")),
        Case("a vector", lambda fill: (fill(13), fill(11, 13) / 4, fill(11), "tanh")),
        Case("of nothing", lambda fill: (fill(4, 0), fill(11, 0), fill(11), "tanh")),
        Case("one row", lambda fill: (fill(1, 128), fill(64, 128) / 8, fill(64), "tanh")),
    ],
    large=Case("large", lambda fill: (fill(2**21 + 1, 1032), fill(64, 1032) / 32, fill(64), "tanh")),
    invalid_cases=[
        Case("sizes that do not fit", lambda fill: (fill(4, 3), fill(5, 4))),
        Case("a bias of another size", lambda fill: (fill(4, 3), fill(5, 3), fill(3))),
        Case("a bias that would be spread", lambda fill: (fill(4, 3), fill(5, 3), fill(1))),
        Case("a number", lambda fill: (fill(3)[0], fill(5, 3))),
        Case("two dtypes", lambda fill: (fill(4, 3), fill(5, 3).half())),
        Case("another form", lambda fill: (fill(4, 3), fill(5, 3), fill(5), "sigmoid")),
    ],
    benchmarks=[
        Case("4096×1024→4096", lambda fill: (fill(4096, 1024), fill(4096, 1024) / 32, fill(4096), "tanh"), goal=1.03),
        Case("8192×4096→4096", lambda fill: (fill(8192, 4096), fill(4096, 4096) / 64, fill(4096), "tanh"), goal=1.02),
        Case("128×1024→1024", lambda fill: (fill(128, 1024), fill(1024, 1024) / 32, fill(1024), "tanh")),
    ],
    sweep=lambda fill, size: (fill(max(size // 1024, 1), 1024), fill(1024, 1024) / 32, fill(1024), "tanh"),
    patterns=[
        lambda x, weight, bias, approximate: F.gelu(F.linear(x, weight, bias), approximate=approximate),
    ],
    worthwhile=worthwhile,
    lower_bound=lambda x, weight, bias, approximate: F.linear(x, weight, bias),
    best_library=lambda x, weight, bias, approximate: torch._addmm_activation(bias, x, weight.T, use_gelu=True),
)
