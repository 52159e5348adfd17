"""Modules and tensors that a training step names beside its model: on the model's device, and at its precision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from optexp.python_state.slots import is_skeleton, plain, refilled, tensors_in
from optexp.python_state.variables import places


def move(step: Callable[..., Any], model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Move modules that a step names to the device and dtype of its model; real tensors in float64 alone.

    Modules in a lower precision keep it, unless the dtype is float64.

    Args:
        step: The user's.
        model: Of the step, which is there already.
        device: Of the model.
        dtype: Of the model.
    """
    own = belongings(model)
    for place in places(step):
        value = place.get()
        if isinstance(value, nn.Module) and not is_skeleton(value):
            tensors = tensors_in(value).values()
            kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
            precision = dtype if dtype is torch.float64 or kinds <= {torch.float32} else None
            if id(value) not in own and not any(id(tensor) in own for tensor in tensors):
                value.to(device, precision)  # type: ignore[call-overload]
        elif place.set is not None and dtype is torch.float64 and plain(value) and _tensors(value):
            place.set(refilled(value, tree_map_only(Tensor, partial(_widened, device=device), value)))


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, Tensor)]


def belongings(model: nn.Module) -> set[int]:
    """Identities of a model and of all its parts."""
    return set(map(id, parts(model)))


def parts(model: nn.Module) -> list[nn.Module | Tensor]:
    return [*model.modules(), *model.parameters(), *model.buffers()]


def _widened(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    wide = tensor.detach().to(device if tensor.device.type != "cpu" else tensor.device, torch.float64)
    if tensor.requires_grad and tensor.is_leaf:  # an optimizer may hold it
        tensor.data = wide
        return tensor
    return wide.requires_grad_(tensor.requires_grad)
