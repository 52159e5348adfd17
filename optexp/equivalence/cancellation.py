"""Sizes of the terms of sums that cancel: a gradient that is zero in exact arithmetic is nothing but their rounding.

The bias of a convolution before a batch norm, or of attention's keys, moves no loss. Its gradient is a sum whose terms
cancel, so that rounding is measured by the sum of their absolute values and not by what is left.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
from torch import Tensor
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from optexp.equivalence.reassociation import DECOMPOSED
from optexp.support.eagerly import EagerMode

LEFT = 1e-6  # of its terms: a sum of which more is left has not cancelled
_ADDING = """
    sum mean mm bmm mv dot convolution_backward embedding_dense_backward index_add scatter_add
"""
_SUMS = frozenset(_ADDING.split())
_COPIES = frozenset(["clone", "_to_copy", "contiguous", "copy_", "neg"])


class Terms(EagerMode):
    """Inside, it is known of every sum that cancels how large its terms are.

    least: what is left of a sum that cancels, at most, as a share of its terms
    """

    def __init__(self, least: float = LEFT) -> None:
        super().__init__()
        self.least = least
        self.sizes: dict[int, float] = {}
        self.alive: list[Tensor] = []  # an address is known by what lies there

    def of(self, tensor: Tensor) -> float:
        """RMS over elements of Σ|terms|; 0 where nothing cancelled."""
        return self.sizes.get(_address(tensor), 0.0)

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not isinstance(func, OpOverload):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        if name in DECOMPOSED and func in decomposition_table:
            with self.again():
                return decomposition_table[func](*args, **kwargs)
        result = func(*args, **kwargs)
        if name in _SUMS:
            absolute = pytree.tree_map(self._absolute, (args, kwargs))
            terms = func(*absolute[0], **absolute[1])
            for left, total in zip(pytree.tree_leaves(result), pytree.tree_leaves(terms), strict=True):
                if _is_real(left) and (size := _rms(total)) and _rms(left) <= self.least * size:
                    self._note(left, size)
        elif name in _COPIES and _is_real(args[0]):
            source = args[1] if name == "copy_" else args[0]
            if isinstance(source, Tensor) and (size := self.of(source)):
                self._note(result, size)
        elif name.rstrip("_") in ("mul", "div") and _is_real(args[0]):
            for factor in filter(_is_real, args[:2]):
                if (size := self.of(factor)) and (before := _rms(factor)):
                    self._note(result, size * _rms(result) / before)
        elif name in ("add", "add_") and all(map(_is_real, args[:2])):
            sizes = [self.of(tensor) or _rms(tensor) for tensor in args[:2]]
            if sum(sizes) and _rms(result) <= self.least * sum(sizes):
                self._note(result, sum(sizes))
        return result

    def _absolute(self, value: Any) -> Any:
        """Absolute values of a term; of one that is itself nothing but rounding, the size of its own terms."""
        if not _is_real(value):
            return value
        size = self.of(value)
        cancelled = size > 0 and _rms(value) <= LEFT * size
        return torch.full_like(value, size) if cancelled else value.abs()

    def _note(self, tensor: Tensor, size: float) -> None:
        self.sizes[_address(tensor)] = size
        self.alive.append(tensor)


def _is_real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and value.is_floating_point()


def _rms(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor)) / sqrt(tensor.numel() or 1)


def _address(tensor: Tensor) -> int:
    if tensor.layout is not torch.strided or tensor._is_zerotensor():
        return 0
    return tensor.untyped_storage().data_ptr()
