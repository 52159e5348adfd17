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
_COUNTING = frozenset(["add", "sub", "mul", "clone", "copy", "_to_copy", "detach", "eq", "ne", "lt", "le", "gt", "ge"])
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
        foreign = func.namespace not in ("aten", "prims") or not isinstance(func, OpOverload)
        name = "" if foreign else func.overloadpacket.__name__
        leaves = pytree.tree_leaves((args, kwargs))
        integers = any(isinstance(leaf, Tensor) and leaf.dtype in _INDICES for leaf in leaves)
        indexed = integers and name.rstrip("_") not in _COUNTING
        self.met |= foreign or indexed or name in _OF_PROBABILITIES or name in _ASSERTIONS
        return func(*args, **kwargs)
