"""The sum of two tensors: two reads and a write, and nothing that could be fused. What is measured is memory."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from optexp.kernelkit import extension
from optexp.kernelkit.elementwise import begin, load, over_vector, store, wide
from optexp.kernelkit.kernel import (
    REFUSED,
    SMALL,
    Case,
    Kernel,
    are_small_alike,
    ceil_div,
    check_tensors,
    laid_out_like,
    operation,
    pays,
)
from optexp.kernelkit.launching import launch

SOURCE = extension.Source("add")
OPERATIONS = 0.5  # of both passes one is work for the device


@triton.jit
def add_forward(a_ptr, b_ptr, y_ptr, size, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    start = tl.program_id(0).to(tl.int64) * BLOCK
    a = wide(load(a_ptr, start, size, BLOCK))
    b = wide(load(b_ptr, start, size, BLOCK))
    store(y_ptr, start, size, a + b, BLOCK)


@triton.jit
def add_plain(a_ptr, b_ptr, y_ptr, size, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < size
    total = tl.load(a_ptr + offsets, mask=mask) + tl.load(b_ptr + offsets, mask=mask)
    tl.store(y_ptr + offsets, total, mask=mask)


def _forward(a: Tensor, b: Tensor) -> Tensor:
    return over_vector(add_forward, _fake(a, b), a, b)


def _cuda_forward(a: Tensor, b: Tensor) -> Tensor:
    y = torch.empty_like(a)
    if y.numel():
        SOURCE.run("forward", laid_out_like(a, y), laid_out_like(b, y), y, y.numel(), y.dtype)
    return y


def _fake(a: Tensor, b: Tensor) -> Tensor:
    return torch.empty_like(a, dtype=torch.promote_types(a.dtype, b.dtype))


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.dtypes = [tensor.dtype for tensor in inputs]


def _differentiate(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
    return tuple(dy.to(dtype) for dtype in ctx.dtypes)


_add = operation("add", _forward, _fake, _save, _differentiate)
_add_cuda = operation("add_cuda", _cuda_forward, _fake, _save, _differentiate)


def add(a: Tensor, b: Tensor) -> Tensor:
    """a + b.

    a, b:  of one shape

    Raises:
        ValueError: Shapes, dtypes or devices do not fit; the message has the remedy.
    """
    if are_small_alike(a, b, OPERATIONS):
        try:
            return torch.add(a, b)  # as an operator it takes Python a tenth longer
        except REFUSED:
            pass  # the checks below name the reason
    check_same(a, b)
    return _add(a, b) if pays(a, OPERATIONS) else reference(a, b)


def cuda(a: Tensor, b: Tensor) -> Tensor:
    """`add` in CUDA C++; tensors that it does not serve go to torch."""
    check_same(a, b)
    return _add_cuda(a, b) if extension.takes(a, b) else reference(a, b)


def launched(a: Tensor, b: Tensor, blocks: int, threads: int) -> Tensor:
    """a + b of contiguous tensors on a GPU, by a grid-stride loop: for studies of the launch configuration.

    Raises:
        RuntimeError: The source does not compile, or the launch fails.
    """
    y = torch.empty_like(a)
    SOURCE.run("strided", a, b, y, y.numel(), blocks, threads, y.dtype)
    return y


def check_same(a: Tensor, b: Tensor) -> None:
    """Check that the shapes are equal.

    Raises:
        ValueError: They are not.
    """
    check_tensors("add", a, b)
    if a.shape != b.shape:
        raise ValueError(
            f"add: shapes {list(a.shape)} and {list(b.shape)} differ; this kernel does not broadcast: write a + b"
        )


def reference(a: Tensor, b: Tensor) -> Tensor:
    return a + b


def plain(a: Tensor, b: Tensor) -> Tensor:
    """The textbook kernel, of contiguous tensors."""
    y = torch.empty_like(a)
    launch(add_plain, ceil_div(a.numel(), 1024), a, b, y, a.numel(), BLOCK=1024)
    return y


class Add(nn.Module):
    """The sum of its two inputs."""

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return add(a, b)


KERNEL = Kernel(
    function=add,
    reference=reference,
    plain=plain,
    cuda=cuda,
    sources=[SOURCE],
    cases=[
        Case("tail", lambda fill: (fill(3, 1711), fill(3, 1711))),
        Case("one element", lambda fill: (fill(1), fill(1))),
        Case("two dtypes", lambda fill: (fill(300), fill(300).float())),
    ],
    large=Case("large", lambda fill: (fill(2**31 + 5), fill(2**31 + 5))),
    invalid_cases=[
        Case("shapes that differ", lambda fill: (fill(4, 3), fill(3))),
        Case("integers", lambda fill: (fill(4).int(), fill(4))),
    ],
    benchmarks=[
        Case("2²⁸", lambda fill: (fill(2**28), fill(2**28))),
        Case("1 K", lambda fill: (fill(1024), fill(1024))),
    ],
    sweep=lambda fill, size: (fill(size), fill(size)),
    patterns=[lambda a, b: a + b],
    worthwhile=lambda a, b: a.numel() * OPERATIONS >= SMALL,  # in a graph, too: torch adds as fast
)
