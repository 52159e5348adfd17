"""Operations whose kernels may assert on values: a failed assertion ends a process that uses a card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

_OF_PROBABILITIES = frozenset(["binary_cross_entropy", "bernoulli", "bernoulli_", "multinomial", "normal"])
_ASSERTIONS = frozenset(["_assert_async", "_assert_scalar"])
_INDICES = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class Asserting:
    """Whether a step has operations that may assert on what they are given.

    These are assertions, operations that take probabilities or indices, and those of other libraries than PyTorch.
    """

    def __init__(self) -> None:
        self.may = True  # as long as no step was looked at
        self._looked = False

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Look at the operations of a step; the first step that ends is enough."""
        if self._looked:
            yield
            return
        with _Looking() as mode:
            yield
        self.may, self._looked = mode.met, True


class _Looking(TorchDispatchMode):
    met = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        name = func.overloadpacket.__name__
        foreign = func.namespace not in ("aten", "prims")
        leaves = pytree.tree_leaves((args, kwargs))
        indexed = any(isinstance(leaf, Tensor) and leaf.dtype in _INDICES for leaf in leaves)
        self.met |= foreign or indexed or name in _OF_PROBABILITIES or name in _ASSERTIONS
        return func(*args, **(kwargs or {}))
