"""GELU in one read and one write; as a formula it makes nine passes over memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from optexp.kernelkit import extension
from optexp.kernelkit.elementwise import begin, exp, from_last, load, over_vector, store, wide
from optexp.kernelkit.kernel import (
    REFUSED,
    Case,
    Kernel,
    ceil_div,
    check_tensors,
    derived,
    is_small,
    laid_out_like,
    operation,
    pays,
)
from optexp.kernelkit.launching import launch

SOURCE = extension.Source("gelu")
FORMS = ("none", "tanh")


@triton.jit
def odds(x):
    """(1 − Φ)/Φ, as GELU's tanh form has it: ½(1 + tanh u) = 1/(1 + exp(−2u)), which loses nothing far left."""
    return tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * x * x))


@triton.jit
def cdf(x, TANH: tl.constexpr):
    """Φ(x). The square of 1/√ takes two instructions, where a quotient that is kept in range takes five."""
    if TANH:
        root = tl.rsqrt(1.0 + odds(x))
        return root * root
    return 0.5 * (1.0 + tl.erf(0.7071067811865476 * x))


@triton.jit
def derivative(x, TANH: tl.constexpr):
    """d(x·Φ(x))/dx. Here an error of Φ is multiplied by up to five: the quotient is worth its price."""
    if TANH:
        p = 1.0 / (1.0 + odds(x))
        return p + x * p * (1.0 - p) * (1.5957691216057308 + 0.21406444881780073 * x * x)
    return cdf(x, TANH) + x * 0.3989422804014327 * exp(-0.5 * x * x)


@triton.jit
def gelu_forward(x_ptr, y_ptr, size, TANH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    x = wide(load(x_ptr, start, size, BLOCK))
    store(y_ptr, start, size, x * cdf(x, TANH), BLOCK)


@triton.jit
def gelu_backward(dy_ptr, x_ptr, dx_ptr, size, TANH: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    start = from_last(tl.program_id(0), size, BLOCK)
    x = wide(load(x_ptr, start, size, BLOCK))
    dy = wide(load(dy_ptr, start, size, BLOCK))
    store(dx_ptr, start, size, dy * derivative(x, TANH), BLOCK)


@triton.jit
def gelu_plain(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    x = tl.load(x_ptr + offsets, mask=mask).to(tl.float32)
    u = 0.7978845608028654 * (x + 0.044715 * x * x * x)
    tanh = 2.0 / (1.0 + tl.exp(-2.0 * u)) - 1.0
    tl.store(y_ptr + offsets, 0.5 * x * (1.0 + tanh), mask=mask)


def _forward(x: Tensor, approximate: str) -> Tensor:
    return over_vector(gelu_forward, torch.empty_like(x), x, TANH=approximate == "tanh")


def _backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    return over_vector(gelu_backward, torch.empty_like(x), dy, x, TANH=approximate == "tanh")


def _cuda_forward(x: Tensor, approximate: str) -> Tensor:
    y = torch.empty_like(x)
    if x.numel():
        SOURCE.run("forward", laid_out_like(x, y), y, x.numel(), approximate == "tanh", x.dtype)
    return y


def _cuda_backward(dy: Tensor, x: Tensor, approximate: str) -> Tensor:
    dx = torch.empty_like(x)
    if x.numel():
        operands = (laid_out_like(dy, dx), laid_out_like(x, dx))
        SOURCE.run("backward", *operands, dx, x.numel(), approximate == "tanh", x.dtype)
    return dx


def _save(ctx: Any, inputs: tuple[Tensor, str], output: Tensor) -> None:
    x, ctx.approximate = inputs
    ctx.save_for_backward(x)


def _operation(name: str, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    gradient = operation(
        f"{name}_backward",
        backward,
        lambda dy, x, approximate: torch.empty_like(x),
        reference=lambda dy, x, approximate: derived(lambda x: reference(x, approximate), [x], dy)[0],
    )

    def differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return gradient(dy, *ctx.saved_tensors, ctx.approximate), None

    return operation(name, forward, lambda x, approximate: torch.empty_like(x), _save, differentiate)


_gelu = _operation("gelu", _forward, _backward)
_gelu_cuda = _operation("gelu_cuda", _cuda_forward, _cuda_backward)


def gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU of every element.

    approximate:  "none" (with erf) or "tanh"

    Raises:
        ValueError: `approximate` is neither, or x has an unsupported dtype.
    """
    if is_small(x):
        try:
            return F.gelu(x, approximate=approximate)
        except REFUSED:
            pass  # the checks below name the reason
    check_tensors("gelu", x)
    check_form("gelu", approximate)
    return _gelu(x, approximate) if pays(x) else reference(x, approximate)


def cuda(x: Tensor, approximate: str = "none") -> Tensor:
    """`gelu` in CUDA C++; tensors that it does not serve go to torch."""
    check_tensors("gelu", x)
    check_form("gelu", approximate)
    return _gelu_cuda(x, approximate) if extension.takes(x) else reference(x, approximate)


def check_form(name: str, approximate: str) -> None:
    """Check that GELU has this form.

    Raises:
        ValueError: It has not.
    """
    if approximate not in FORMS:
        raise ValueError(f"{name}: approximate is {approximate!r}, and must be one of {', '.join(FORMS)}")


def reference(x: Tensor, approximate: str = "none") -> Tensor:
    return F.gelu(x, approximate=approximate)


def plain(x: Tensor, approximate: str = "tanh") -> Tensor:
    """The textbook kernel in the tanh form, of a contiguous tensor."""
    y = torch.empty_like(x)
    launch(gelu_plain, ceil_div(x.numel(), 1024), x, y, x.numel(), BLOCK=1024)
    return y


class GELU(nn.GELU):
    """nn.GELU by our kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return gelu(x, self.approximate)


KERNEL = Kernel(
    function=gelu,
    reference=reference,
    plain=plain,
    cuda=cuda,
    sources=[SOURCE],
    cases=[
        Case("tanh", lambda fill: (fill(7, 613), "tanh")),
        Case("exact", lambda fill: (fill(7, 613), "none")),
        Case("one element", lambda fill: (fill(1), "tanh")),
        Case("far out", lambda fill: (fill(2048) * 6, "tanh")),
    ],
    large=Case("large", lambda fill: (fill(2**31 + 5), "tanh")),
    invalid_cases=[
        Case("another form", lambda fill: (fill(4), "sigmoid")),
        Case("integers", lambda fill: (fill(4).int(),)),
    ],
    benchmarks=[
        Case("16384²", lambda fill: (fill(16384, 16384), "tanh"), goal=1.01),
        Case("1 K", lambda fill: (fill(1024), "tanh")),
    ],
    sweep=lambda fill, size: (fill(size), "tanh"),
    patterns=[lambda x, approximate: F.gelu(x, approximate=approximate)],
    worthwhile=lambda x, _: pays(x),
)
