"""Plain int8, as a careful user would write it: the yardstick of PRECISION(int8).

Operands of matrix products, convolutions and recurrent layers are rounded to 255 values by the largest value of each
tensor, and the products are computed in the program's own dtype. This is dynamic quantization without its kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from optexp.errors import Unsupported
from optexp.program import Program

LEVELS = 127  # on each side of 0
PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        *(F.linear, F.bilinear, F.conv1d, F.conv2d, F.conv3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
        *(torch.matmul, torch.mm, torch.bmm, torch.addmm, torch.baddbmm),
        *(Tensor.matmul, Tensor.__matmul__, Tensor.mm, Tensor.bmm),
        *(torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu),
    }
)


def rounded_to_int8(program: Program) -> Program:
    """The program with a forward whose products have rounded operands.

    Raises:
        Unsupported: the program has gradients, which rounding has not.
    """
    if program.trains:
        raise Unsupported("int8 is a precision of inference, which has no gradients: use workload.mode=forward")
    call = program.call

    def forward(*args: Any, **kwargs: Any) -> Any:
        with RoundedProducts():
            return call(*args, **kwargs)

    return replace(program, forward=forward)


class RoundedProducts(TorchFunctionMode):
    """Inside, operands of `PRODUCTS` are rounded; biases, which have one dimension, are not."""

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given: tuple[Any, Any] = tuple(args), dict(kwargs or {})
        if func in PRODUCTS:
            given = tree_map(_rounded, given)
        return func(*given[0], **given[1])


def _rounded(value: Any) -> Any:
    if not isinstance(value, Tensor) or value.dim() < 2 or not value.is_floating_point() or not value.numel():
        return value
    step = value.abs().amax() / LEVELS
    return torch.where(step > 0, (value / step).round() * step, value)
