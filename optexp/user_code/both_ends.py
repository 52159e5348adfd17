"""Integers that a user's inputs draw: rules such as padding lie at the ends of their range, and sums over equal ids are
easily got wrong. Of 30,000 ids 0 is rarely drawn, and few are drawn twice."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

MANY = 8  # elements


class BothEnds(TorchFunctionMode):
    """Inside, the least and the largest number occur in what `torch.randint` gives, of two elements or more; of `MANY`,
    the least occurs twice.

    Generators move as without it.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Collection[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        drawn = func(*args, **given)
        if func is torch.randint and drawn.numel() > 1:
            put_ends(drawn, *bounds(args, given))
        return drawn


def bounds(args: Sequence[Any], given: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the largest number that a call of `torch.randint` may draw.

    args: (low, high, size) or (high, size), from the left; `given` has the others
    """
    placed = [value for value in args if not isinstance(value, (tuple, list))]  # numpy's numbers, too, and not the size
    numbers = [int(value) for value in (*placed, *(given[key] for key in ("low", "high") if key in given))]
    low, high = numbers if len(numbers) == 2 else (0, *numbers)
    return low, high - 1


def put_ends(drawn: Tensor, least: int, largest: int) -> None:
    """In place, at places that follow from the drawn numbers."""
    flat = drawn.view(-1)
    count, known = len(flat), int(flat.sum(dtype=torch.int64))
    step = 1 + known // count % (max(count - 1, 2) // 2)
    for place, number in enumerate((least, largest, least)[: 3 if count >= MANY else 2]):
        flat[(known + place * step) % count] = number
