"""Sums at places that indices choose, their terms in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from optexp.equivalence.reassociation import Reassociated


def _index_add(mode: Reassociated, func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor, **kw: Any) -> Tensor:
    order = _permutation(mode, index.numel(), index.device)
    if not source.dim():
        return func(x, dim, index, source, **kw)  # type: ignore[no-any-return]
    return func(x, dim, index.reshape(-1)[order], source.index_select(dim, order), **kw)  # type: ignore[no-any-return]


def _scatter_add(mode: Reassociated, func: Any, x: Tensor, dim: int, index: Tensor, source: Tensor) -> Tensor:
    if not index.dim():
        return func(x, dim, index, source)  # type: ignore[no-any-return]
    order = _permutation(mode, index.shape[dim], index.device)
    source = source.narrow(dim, 0, index.shape[dim])
    return func(x, dim, index.index_select(dim, order), source.index_select(dim, order))  # type: ignore[no-any-return]


def _index_put(mode: Reassociated, func: Any, x: Tensor, indices: Any, values: Tensor, *rest: Any) -> Any:
    rows = [i for i in indices if i is not None]
    in_rows = all(i.dim() == 1 and i.dtype is torch.int64 and len(i) == len(rows[0]) for i in rows)
    if not (rest and rest[0] and in_rows and indices[0] is not None and values.shape[:1] == rows[0].shape):
        return func(x, indices, values, *rest)
    order = _permutation(mode, len(values), values.device)
    return func(x, [i if i is None else i[order] for i in indices], values[order], *rest)


def _embedding_backward(mode: Reassociated, func: Any, slope: Tensor, indices: Tensor, *rest: Any) -> Tensor:
    order = _permutation(mode, indices.numel(), indices.device)
    rows = slope.reshape(-1, slope.shape[-1])[order]
    return func(rows, indices.reshape(-1)[order], *rest)  # type: ignore[no-any-return]


def _permutation(mode: Reassociated, count: int, device: torch.device) -> Tensor:
    return torch.randperm(count, generator=mode.steps.generator(device), device=device)


REORDERED: Mapping[str, Callable[..., Any]] = {
    "index_add": _index_add,
    "index_add_": _index_add,
    "scatter_add": _scatter_add,
    "scatter_add_": _scatter_add,
    "index_put": _index_put,
    "index_put_": _index_put,
    "_index_put_impl_": _index_put,
    "embedding_dense_backward": _embedding_backward,
}
