"""Batches of tensors by position or by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

Batch = tuple[Tensor, ...] | Mapping[str, Tensor]


Source = Sequence[Batch]


Outputs = dict[str, Tensor]


Remembered = Mapping[str, Any]


Packed = Mapping[str, bytes]


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    """A batch's tensors by name: a mapping's keys, or positions as text."""
    if isinstance(batch, Mapping):
        return dict(batch)
    return {str(index): tensor for index, tensor in enumerate(batch)}


def map_batch(function: Callable[[Tensor], Tensor], batch: Batch) -> Batch:
    """A batch of the same form, with `function` applied to every tensor."""
    if isinstance(batch, Mapping):
        return {name: function(tensor) for name, tensor in batch.items()}
    return tuple(function(tensor) for tensor in batch)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch on `device`; tensors that lie there already are not copied."""
    return map_batch(lambda tensor: tensor.to(device), batch)
