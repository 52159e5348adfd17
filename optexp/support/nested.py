"""Nested tensors as their dense parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def rows(tensor: Tensor) -> tuple[Tensor, Tensor] | None:
    """Values and offsets of a nested tensor whose rows follow each other in one dense tensor; None for others."""
    nested: Any = tensor
    if nested.layout is not torch.jagged or nested.lengths() is not None or nested._ragged_idx != 1:
        return None
    return nested.values(), nested.offsets()
