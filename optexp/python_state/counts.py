"""Counts among what steps keep: whole numbers that each step moves on as far as the one before."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
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
    shape = trees[-1][1]
    if any(other != shape for _, other in trees):
        return values[-1], set()
    moved = [_moved_on(seen, steps) for seen in zip(*(tree[0] for tree in trees), strict=True)]
    return tree_unflatten([later for later, _ in moved], shape), {by for _, paces in moved for by in paces}


def _moved_on(seen: Sequence[Any], steps: int) -> tuple[Any, set[int]]:
    if all(isinstance(value, nn.Module) for value in seen):
        return _network_moved_on(seen, steps)
    by = pace(seen)
    return (seen[-1] + by * steps, {by}) if by else (seen[-1], set())


def _network_moved_on(seen: Sequence[nn.Module], steps: int) -> tuple[nn.Module, set[int]]:
    """With its buffers that count, as the number of models that `AveragedModel` holds the mean of."""
    held = [dict(network.named_buffers()) for network in seen]
    paces = {name: by for name in held[-1] if (by := pace([buffers.get(name) for buffers in held]))}
    if not paces:
        return seen[-1], set()
    later = copy.deepcopy(seen[-1])
    for name, by in paces.items():
        later.get_buffer(name).add_(by * steps)
    return later, set(paces.values())


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and value.dtype is not torch.bool and not value.is_complex()
    return type(value) in (int, float)
