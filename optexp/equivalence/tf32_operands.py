"""Operands of products and convolutions in TF32, as the kernels that a library may choose take them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

TF32 = 2.0**-10  # its eps


def in_products(a: Tensor) -> bool:
    """Whether torch allows TF32 in a product of this operand."""
    backends: Any = torch.backends
    return a.is_cuda and a.dtype is torch.float32 and bool(backends.cuda.matmul.fp32_precision == "tf32")


def in_convolutions(x: Tensor) -> bool:
    """Whether torch allows TF32 in a convolution of this operand."""
    backends: Any = torch.backends
    return x.is_cuda and x.dtype is torch.float32 and bool(backends.cudnn.conv.fp32_precision == "tf32")


def whole(tensor: Tensor) -> Tensor:
    """The operand itself, as kernels without TF32 take it."""
    return tensor


def nearest(tensor: Tensor) -> Tensor:
    """Rounded to TF32's 10 bits, as cuDNN and cuBLAS do."""
    return ((tensor.view(torch.int32) + 2**12) & -(2**13)).view(torch.float32)


def cut(tensor: Tensor) -> Tensor:
    """The first 10 bits, which tensor cores read of a float32 without rounding, as in Triton: smaller by 3e-4 in the
    mean, in all elements alike."""
    return (tensor.view(torch.int32) & -(2**13)).view(torch.float32)


# Functions that a reassociated run chooses from, by its number.
BY_RUN: Sequence[Sequence[Callable[[Tensor], Tensor]]] = (
    (nearest,),
    (cut,),
    (whole, nearest, cut),
    (whole, nearest, cut),
)
