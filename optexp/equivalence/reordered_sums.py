"""Sums, means, variances and running sums, added up in another order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy
import torch
from torch import Tensor

from optexp.equivalence.rounding_steps import BITS, NARROW

if TYPE_CHECKING:
    from optexp.equivalence.reassociation import Reassociated

# Running sums side by side, by run, where rows are added up on a CPU. One alone is the least exact, and what compiled
# loops have: most runs have it, since the error of a few sums differs from run to run and from batch to batch.
LANES = (1, 1, 1, 16)
LANES_OF_ALL = (16, 8, 16, 32)  # where everything is one sum, which no library adds up in one lane
CHUNKS = 32  # of a sum, one after the other; on a GPU each takes a launch
WHOLE = 2**26  # elements: larger tensors are copied by chunks only


def _sum(mode: Reassociated, func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("dtype") or x.dtype
    if dtype not in BITS or x.dtype not in BITS or not x.numel():
        return func(x, *(() if dim is None else (dim, keepdim)), **kwargs)  # type: ignore[no-any-return]
    return added(mode, x, _axes(x, dim), keepdim).to(dtype)


def _mean(mode: Reassociated, func: Any, x: Tensor, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Tensor:
    dtype = kwargs.get("dtype") or x.dtype
    if dtype not in BITS or x.dtype not in BITS or not x.numel():
        return func(x, *(() if dim is None else (dim, keepdim)), **kwargs)  # type: ignore[no-any-return]
    axes = _axes(x, dim)
    return (added(mode, x, axes, keepdim) / prod(x.shape[axis] for axis in axes)).to(dtype)


def _var_mean(mode: Reassociated, func: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Mean first, then the squares of what is left, as every implementation that is exact enough for float32."""
    given = dict(zip((argument.name for argument in func._schema.arguments[1:]), args, strict=False)) | kwargs
    dim, keepdim = given.get("dim"), given.get("keepdim", False)
    correction = given.get("correction", int(given.get("unbiased", True)))
    if not x.numel() or x.dtype not in BITS:
        return func(x, *args, **kwargs)
    axes = _axes(x, dim)
    count = prod(x.shape[axis] for axis in axes)
    mean = added(mode, x, axes, keepdim=True) / count
    mode.round_(mean)
    squares = (x - mean).square_()
    mode.round_(squares)
    freedom = max(count - (1 if correction is None else correction), 0)
    var = added(mode, squares, axes, keepdim=True) / freedom if freedom else squares.sum(axes, keepdim=True) / 0
    mean, var = (found if keepdim else found.squeeze(axes) for found in (mean.to(x.dtype), var.to(x.dtype)))
    name = func.overloadpacket.__name__
    found = var.sqrt() if name.startswith("std") else var
    return (found, mean) if name.endswith("_mean") else found


def _axes(x: Tensor, dim: Any) -> list[int]:
    if dim is None or dim == []:
        return list(range(x.dim()))
    return sorted({axis % max(x.dim(), 1) for axis in ([dim] if isinstance(dim, int) else dim)})


def added(mode: Reassociated, x: Tensor, axes: Sequence[int], keepdim: bool = False) -> Tensor:
    """The sum over some dimensions; of narrow numbers in float32, as all libraries add them up."""
    if not axes or not x.dim():
        return x.float() if x.dtype in NARROW else x.clone()
    wide = torch.float32 if x.dtype in NARROW else x.dtype
    if x.device.type == "cpu" and x.numel() <= WHOLE:
        total = _in_a_row(mode, x.to(wide), axes)
    else:
        longest = max(axes, key=lambda axis: x.shape[axis])
        pieces = x.tensor_split(min(CHUNKS, x.shape[longest]), longest)
        total = x.new_zeros((), dtype=wide)
        for at in mode.shuffled(len(pieces)):
            total = total + pieces[at].sum(tuple(axes), dtype=wide)
    return total.reshape([1 if axis in axes else size for axis, size in enumerate(x.shape)]) if keepdim else total


def _in_a_row(mode: Reassociated, x: Tensor, axes: Sequence[int]) -> Tensor:
    """One after the other, as compiled loops do: numpy adds up rows in no tree. What lies side by side in memory is
    added up in several lanes."""
    others = [axis for axis in range(x.dim()) if axis not in axes]
    rows = x.detach().permute(*axes, *others)
    shape = [x.shape[axis] for axis in others]
    count, width = prod(x.shape[axis] for axis in axes), prod(shape)
    values = rows.reshape(count, width).numpy()
    if mode.seed % 2 == 0:
        values = values[::-1]
    inner = x.dim() - 1 in axes
    lanes = (LANES_OF_ALL if width == 1 else LANES)[(mode.seed - 1) % len(LANES)] if inner or width == 1 else 1
    lanes = min(lanes, count)
    if lanes > 1 or width == 1:
        whole = count - count % lanes
        lines = numpy.add.reduce(values[:whole].reshape(whole // lanes, lanes * width), axis=0)
        values = numpy.concatenate([lines.reshape(lanes, width), values[whole:]])
        total = values[0].copy()
        for line in values[1:]:
            total += line
    else:
        total = numpy.add.reduce(values, axis=0)
    return torch.from_numpy(numpy.ascontiguousarray(total)).reshape(shape)


def _cumsum(mode: Reassociated, func: Any, x: Tensor, dim: int, **kwargs: Any) -> Tensor:
    """In blocks, each of which begins with the sum of those before it."""
    dtype = kwargs.get("dtype") or x.dtype
    if not x.dim() or x.shape[dim] < 2 or dtype not in BITS:
        return func(x, dim, **kwargs)  # type: ignore[no-any-return]
    wide = torch.float32 if dtype in NARROW else dtype
    blocks, before = list[Tensor](), None
    for piece in x.to(wide).tensor_split(min(CHUNKS // mode.seed + 1, x.shape[dim]), dim):
        sums = piece.cumsum(dim) if before is None else piece.cumsum(dim) + before
        blocks.append(sums)
        before = sums.narrow(dim, sums.shape[dim] - 1, 1)
    return torch.cat(blocks, dim).to(dtype)


REORDERED: Mapping[str, Callable[..., Any]] = {
    "sum": _sum,
    "mean": _mean,
    "var": _var_mean,
    "var_mean": _var_mean,
    "std": _var_mean,
    "std_mean": _var_mean,
    "cumsum": _cumsum,
}
