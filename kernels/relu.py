"""ReLU, also in place. Alone it is as fast as torch's; it is here to be studied, and to be written over its input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from optexp.kernel import (
    Case,
    Kernel,
    ceil_div,
    check_tensors,
    derived,
    is_small,
    is_traced,
    laid_out_like,
    needs_gradient,
    operation,
    pays,
)
from optexp.kernelkit import extension
from optexp.kernelkit.launching import launch
from optexp.kernelkit.tiles import begin, from_last, load, over_vector, store, wide


@triton.jit
def relu_forward(x_ptr, y_ptr, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    x = wide(load(x_ptr, start, size, BLOCK))
    store(y_ptr, start, size, tl.where(x <= 0, 0.0, x), BLOCK)


@triton.jit
def relu_backward(dy_ptr, y_ptr, dx_ptr, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin(EARLY)
    start = from_last(tl.program_id(0), size, BLOCK)
    y = wide(load(y_ptr, start, size, BLOCK))
    dy = wide(load(dy_ptr, start, size, BLOCK))
    store(dx_ptr, start, size, tl.where(y <= 0, 0.0, dy), BLOCK)


@triton.jit
def relu_plain(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(y_ptr + offsets, tl.maximum(tl.load(x_ptr + offsets, mask=mask), 0.0), mask=mask)


def _forward(x: Tensor) -> Tensor:
    return over_vector(relu_forward, torch.empty_like(x), x)


def _backward(dy: Tensor, y: Tensor) -> Tensor:
    return over_vector(relu_backward, torch.empty_like(y), dy, y)


def _cuda_forward(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    if x.numel():
        extension.run("relu", "forward", laid_out_like(x, y), y, x.numel(), x.dtype)
    return y


def _cuda_backward(dy: Tensor, y: Tensor) -> Tensor:
    dx = torch.empty_like(y)
    if y.numel():
        extension.run("relu", "backward", laid_out_like(dy, dx), laid_out_like(y, dx), dx, y.numel(), y.dtype)
    return dx


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _operation(name: str, forward: Callable[..., Tensor], backward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    gradient = operation(
        f"{name}_backward",
        backward,
        lambda dy, y: torch.empty_like(y),
        reference=lambda dy, y: derived(torch.relu, [y], dy)[0],
    )

    def differentiate(ctx: Any, dy: Tensor) -> Tensor:
        result: Tensor = gradient(dy, *ctx.saved_tensors)
        return result

    return operation(name, forward, torch.empty_like, _save, differentiate)


_relu = _operation("relu", _forward, _backward)
_relu_cuda = _operation("relu_cuda", _cuda_forward, _cuda_backward)


def relu(x: Tensor) -> Tensor:
    """max(x, 0); NaN stays NaN."""
    if is_small(x):
        return torch.relu(x)
    check_tensors("relu", x)
    return _relu(x) if pays(x) else reference(x)


def cuda(x: Tensor) -> Tensor:
    """The same in CUDA C++."""
    check_tensors("relu", x)
    return _relu_cuda(x) if extension.takes(x) else reference(x)


def relu_(x: Tensor) -> Tensor:
    """Written over x, by CUDA C++ where x is on a GPU, dense, and no gradient is wanted; else by torch."""
    check_tensors("relu_", x)
    dense = x.stride() == torch.empty_like(x, device="meta").stride()
    if not extension.takes(x) or not dense or is_traced((x,)) or needs_gradient((x,)):
        return F.relu_(x)
    if x.numel():
        extension.run("relu", "forward", x, x, x.numel(), x.dtype)
        torch.autograd.graph.increment_version(x)
    return x


def reference(x: Tensor) -> Tensor:
    return torch.relu(x)


def plain(x: Tensor) -> Tensor:
    """Of a contiguous tensor."""
    y = torch.empty_like(x)
    launch(relu_plain, ceil_div(x.numel(), 1024), x, y, x.numel(), BLOCK=1024)
    return y


KERNEL = Kernel(
    function=relu,
    reference=reference,
    plain=plain,
    cuda=cuda,
    cases=[
        Case("tail", lambda fill: (fill(7, 613),)),
        Case("one element", lambda fill: (fill(1),)),
    ],
    large=Case("large", lambda fill: (fill(2**31 + 5),)),
    mistakes=[Case("integers", lambda fill: (fill(4).int(),))],
    benchmarks=[
        Case("16384²", lambda fill: (fill(16384, 16384),)),
        Case("1 K", lambda fill: (fill(1024),)),
    ],
    sweep=lambda fill, size: (fill(size),),
    patterns=[lambda x: torch.relu(x)],
    worthwhile=lambda x: x.numel() >= 2**24,  # torch is as fast: only where nobody waits for the launch
)
