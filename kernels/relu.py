"""ReLU, also in place. Backward needs one bit of each element, and forward saves no more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor, nn

from optexp.kernelkit import extension
from optexp.kernelkit.bitmask import bits_for, given, has_many, load_bits, store_bits, unpacked, worth_bits
from optexp.kernelkit.elementwise import begin, from_last, load, over_vector, store, wide
from optexp.kernelkit.kernel import (
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
from optexp.kernelkit.launching import launch

SOURCE = extension.Source("relu")


@triton.jit
def relu_forward(x_ptr, passed_ptr, y_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    x = wide(load(x_ptr, start, size, BLOCK))
    stopped = x <= 0  # compared this way, NaN passes
    store(y_ptr, start, size, tl.where(stopped, 0.0, x), BLOCK)
    if passed_ptr is not None:
        store_bits(passed_ptr, start, size, stopped == 0, BLOCK)


@triton.jit
def relu_backward(dy_ptr, saved_ptr, dx_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """`saved_ptr` has the result, or one bit for each element: whether it passed."""
    begin(PDL)
    start = from_last(tl.program_id(0), size, BLOCK)
    dy = load(dy_ptr, start, size, BLOCK)  # on its way before a barrier: bits are handed out to threads
    if saved_ptr.dtype.element_ty == tl.int32:
        passed = load_bits(saved_ptr, start, size, BLOCK)
    else:
        passed = (load(saved_ptr, start, size, BLOCK) <= 0) == 0
    store(dx_ptr, start, size, tl.where(passed, dy, 0.0), BLOCK)


@triton.jit
def relu_plain(x_ptr, y_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    tl.store(y_ptr + offsets, tl.maximum(tl.load(x_ptr + offsets, mask=mask), 0.0), mask=mask)


def _forward(x: Tensor, bits: bool) -> tuple[Tensor, Tensor]:
    """The result and, with `bits`, one bit for each element in memory order: whether it passed."""
    y, passed = _fake(x, bits)
    return over_vector(relu_forward, y, x, bits=[given(passed)]), passed


def _fake(x: Tensor, bits: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), bits_for(x, bits)


def _backward(dy: Tensor, saved: Tensor, strides: Sequence[int]) -> Tensor:
    """dx of a result with these strides; `saved` is the result, or bits."""
    dx = _like_result(dy, saved, strides)
    if saved.dtype == torch.int32:
        return over_vector(relu_backward, dx, dy, bits=[saved])
    return over_vector(relu_backward, dx, dy, saved)


def _like_result(dy: Tensor, saved: Tensor, strides: Sequence[int]) -> Tensor:
    return dy.new_empty_strided(dy.shape, strides)


def _derived(dy: Tensor, saved: Tensor, strides: Sequence[int]) -> Tensor:
    """dx in plain PyTorch, for double backward."""
    if saved.dtype == torch.int32:
        return torch.where(unpacked(saved).as_strided(dy.shape, strides) != 0, dy, 0.0)
    return derived(torch.relu, [saved], dy)[0]  # type: ignore[no-any-return]


def _remember(ctx: Any, inputs: tuple[Tensor, bool], output: tuple[Tensor, Tensor]) -> None:
    y, passed = output
    ctx.strides = y.stride()
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(passed if passed.numel() else y)


def _differentiate(ctx: Any, dy: Tensor | None, _: None) -> tuple[Tensor | None, None]:
    return None if dy is None else _relu_backward(dy, *ctx.saved_tensors, ctx.strides), None


_relu_backward = operation("relu_backward", _backward, _like_result, reference=_derived)
_relu = operation("relu", _forward, _fake, _remember, _differentiate)


def _cuda_forward(x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    if x.numel():
        SOURCE.run("forward", laid_out_like(x, y), y, x.numel(), x.dtype)
    return y


def _cuda_backward(dy: Tensor, y: Tensor) -> Tensor:
    dx = torch.empty_like(y)
    if y.numel():
        SOURCE.run("backward", laid_out_like(dy, dx), laid_out_like(y, dx), dx, y.numel(), y.dtype)
    return dx


def _save(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _differentiate_cuda(ctx: Any, dy: Tensor) -> Any:
    return _relu_cuda_backward(dy, *ctx.saved_tensors)


_relu_cuda_backward = operation(
    "relu_cuda_backward",
    _cuda_backward,
    lambda dy, y: torch.empty_like(y),
    reference=lambda dy, y: derived(torch.relu, [y], dy)[0],
)
_relu_cuda = operation("relu_cuda", _cuda_forward, torch.empty_like, _save, _differentiate_cuda)


def relu(x: Tensor) -> Tensor:
    """max(x, 0) of every element; NaN stays NaN.

    Raises:
        ValueError: x has an unsupported dtype.
    """
    if is_small(x):
        return torch.relu(x)
    check_tensors("relu", x)
    return _relu(x, worth_bits(x))[0] if pays(x) else reference(x)


def cuda(x: Tensor) -> Tensor:
    """`relu` in CUDA C++; tensors that it does not serve go to torch."""
    check_tensors("relu", x)
    return _relu_cuda(x) if extension.takes(x) else reference(x)


def relu_(x: Tensor) -> Tensor:
    """ReLU in place: by CUDA C++ where x is on a GPU, dense, and needs no gradient, else by torch. Returns x.

    Raises:
        ValueError: x has an unsupported dtype.
    """
    check_tensors("relu_", x)
    dense = x.stride() == torch.empty_like(x, device="meta").stride()
    if not extension.takes(x) or not dense or is_traced((x,)) or needs_gradient((x,)):
        return F.relu_(x)
    if x.numel():
        SOURCE.run("forward", x, x, x.numel(), x.dtype)
        torch.autograd.graph.increment_version(x)
    return x


def reference(x: Tensor) -> Tensor:
    return torch.relu(x)


def plain(x: Tensor) -> Tensor:
    """The textbook kernel, of a contiguous tensor."""
    y = torch.empty_like(x)
    launch(relu_plain, ceil_div(x.numel(), 1024), x, y, x.numel(), BLOCK=1024)
    return y


class ReLU(nn.ReLU):
    """nn.ReLU by our kernel."""

    def forward(self, x: Tensor) -> Tensor:
        return relu_(x) if self.inplace else relu(x)


KERNEL = Kernel(
    function=relu,
    reference=reference,
    plain=plain,
    cuda=cuda,
    sources=[SOURCE],
    saved_bytes=lambda x: bits_for(x, has_many(x)).nbytes,
    cases=[
        Case("tail", lambda fill: (fill(7, 613),)),
        Case("one element", lambda fill: (fill(1),)),
    ],
    large=Case("large", lambda fill: (fill(2**31 + 5),)),
    invalid_cases=[Case("integers", lambda fill: (fill(4).int(),))],
    benchmarks=[
        Case("16384²", lambda fill: (fill(16384, 16384),)),
        Case("1 K", lambda fill: (fill(1024),)),
    ],
    sweep=lambda fill, size: (fill(size),),
    patterns=[lambda x: torch.relu(x)],
    worthwhile=lambda x: x.numel() >= 2**24,  # torch is as fast: only where no host waits for the launch
)
