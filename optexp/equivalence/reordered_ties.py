"""Selections whose equal elements torch leaves in any order, with these in another one: `topk`, and a sort that is not
stable.

What a program makes of such an order is no part of its result: neighbours at one distance, scores that are all 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from optexp.equivalence.reassociation import Reassociated

Selected = tuple[Tensor, Tensor]  # values, and their places


def _topk(
    mode: Reassociated, func: Any, x: Tensor, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Selected:
    return _in_another_order(mode, x, dim, partial(func, k=k, dim=dim, largest=largest, sorted=sorted))


def _sort(
    mode: Reassociated, func: Any, x: Tensor, dim: int = -1, descending: bool = False, stable: bool | None = False
) -> Selected:
    if stable:
        return func(x, stable=stable, dim=dim, descending=descending)  # type: ignore[no-any-return]
    return _in_another_order(mode, x, dim, partial(torch.sort, dim=dim, descending=descending))


def _in_another_order(mode: Reassociated, x: Tensor, dim: int, select: Callable[[Tensor], Selected]) -> Selected:
    values, places = select(x)
    if not x.dim():
        return values, places
    order = mode.order_of_ties(x.shape[dim], x.device)
    others = order[select(x.index_select(dim, order))[1]]
    mode.ties += int((others != places).sum())
    return values, others


SELECTIONS: Mapping[Any, Callable[..., Selected]] = {
    torch.ops.aten.topk.default: _topk,
    torch.ops.aten.sort.default: _sort,
    torch.ops.aten.sort.stable: _sort,
}
