"""Counts among what steps keep: whole numbers that each step moves on as far as the one before."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def pace(values: Sequence[Any]) -> int:
    """How far a step moves a count, of which these are the values after consecutive steps; 0 of anything else."""
    if not all(map(_is_number, values)):
        return 0
    numbers = [float(value) for value in values]
    moved = {later - earlier for earlier, later in pairwise(numbers)}
    by = moved.pop() if len(moved) == 1 else 0.0
    return int(by) if by > 0 and by.is_integer() and numbers[-1].is_integer() else 0


def moved_on(values: Sequence[Any], steps: int) -> tuple[Any, set[int]]:
    """The last of the values that consecutive steps left, with its counts so many steps further, and their paces."""
    trees = list(map(tree_flatten, values))
    leaves, shape = trees[-1]
    if any(other != shape for _, other in trees):
        return values[-1], set()
    paces = [pace(found) for found in zip(*(tree[0] for tree in trees), strict=True)]
    later = [leaf + by * steps if by else leaf for leaf, by in zip(leaves, paces, strict=True)]
    return tree_unflatten(later, shape), {by for by in paces if by}


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype is not torch.bool and not value.is_complex()
    return type(value) in (int, float)
