"""Operations whose kernels may assert on values: a failed assertion ends a process that uses a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from optexp.support.eagerly import EagerMode

_DRAWING = ["bernoulli", "bernoulli_", "multinomial", "normal", "poisson", "binomial"]
_OF_PROBABILITIES = frozenset(["binary_cross_entropy", *_DRAWING])
_ASSERTIONS = frozenset(["_assert_async", "_assert_scalar"])
_COUNTING = frozenset([
    "add", "sub", "rsub", "mul", "div", "floor_divide", "remainder", "pow", "_foreach_add", "clone", "copy", "_to_copy",
    "detach", "eq", "ne", "lt", "le", "gt", "ge",
])  # fmt: skip
_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Asserting:
    """Detector of operations that may assert on values in a step.

    These are assertions, operations that take probabilities, rates or indices, those of other libraries than PyTorch,
    and operators of operators, as flex_attention.

    may:    also where no step was looked at, or the step failed
    looked: one step is enough
    """

    def __init__(self) -> None:
        self.may, self.looked = True, False

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the operations of a step."""
        self.looked = True
        with _Looking() as mode:
            yield
        self.may = mode.met


class _Looking(EagerMode):
    met = False

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = _name(func)
        self.met |= not name or name in _OF_PROBABILITIES or name in _ASSERTIONS or bool(_indices(func, args, kwargs))
        return func(*args, **kwargs)


class IndicesAsBefore(EagerMode):
    """Integers that operations take in some steps. In later steps an integer twice as large raises IndexError: as an
    index it may lie beyond its table, and the kernel that asserts it would end the process.

    later: the first steps are over
    """

    def __init__(self) -> None:
        super().__init__()
        self.later, self._largest = False, 0

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        largest = max((int(found.abs().max()) for found in _indices(func, args, kwargs) if found.numel()), default=0)
        if not self.later:
            self._largest = max(self._largest, largest)
        elif largest > 2 * self._largest:
            raise IndexError(f"{func} takes {largest}, and no more than {self._largest} before")
        return func(*args, **kwargs)


def _name(func: Any) -> str:
    """Name of an operation of PyTorch; empty for any other operation."""
    known = isinstance(func, OpOverload) and func.namespace in ("aten", "prims")
    return func.overloadpacket.__name__ if known else ""


def _indices(func: Any, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """Integers that it takes and may use as indices."""
    if _name(func).rstrip("_") in _COUNTING:
        return []
    leaves = pytree.tree_leaves((args, kwargs))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype in _INDICES]
