"""Families of inputs beside the usual ones: where arithmetic that is right on normal values goes wrong.

A workload declares those that mean something to it. Each changes the real inputs of a normal batch; targets, integers,
masks, labels and what has a range of its own stay as they are. `WITH_TARGETS` change the entries that a user's own step
takes beside the model's inputs, too: it may divide by a spread of rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from optexp.program import Batch, map_batch, tensors_of
from optexp.records.verification import NORMAL as NORMAL
from optexp.support import sparse

NONCONTIGUOUS = "noncontiguous"  # the same values, laid out with gaps; made in the arms, since a transfer has no gaps
FIRST = 64  # elements of an input that are looked at before all of them
EXCHANGES = 8  # batches that this is done with: each is kept by every arm
ONE_BY_ONE = "one by one"  # a batch, then the same with one input after the other exchanged: does the result follow?


def integers(x: Tensor) -> Tensor:
    """Small ones: sums and products are exact, so that linear operations must agree bit for bit."""
    return (x * 2).round().clamp(-8, 8)


def corners(x: Tensor) -> Tensor:
    """Multiples of a half, which are ties of comparisons and roundings. One sample is zero, one so small that an eps
    shows, and one beyond most bounds, each as far as its gradients are finite."""
    x = (x * 2).round() / 2 + 0.0  # without negative zeros
    samples = x
    while samples.dim() > 1 and 0 < len(samples) < 4:
        samples = samples[0]
    if samples.dim() and len(samples) > 3:
        samples[0] = 0
        samples[1] /= 256
        samples[2] *= 16
    return x


def large(x: Tensor) -> Tensor:
    return x * (1024 if x.dtype.itemsize >= 4 else 16)


def small(x: Tensor) -> Tensor:
    return x / 1024


def offset(x: Tensor) -> Tensor:
    """A large mean and a small spread: a variance in one pass cancels."""
    return x / 8 + 64


def constant_rows(x: Tensor) -> Tensor:
    """Nearly constant rows: what is left of a variance is its eps."""
    return x[..., :1] + x / 1024 if x.dim() else x


def structured(x: Tensor) -> Tensor:
    """Four of five elements are zero and, of square matrices, the rest is symmetric: what a step may look for, to take
    a shorter way."""
    sparse = x * (torch.arange(x.numel(), device=x.device) % 5 == 0).view(x.shape)
    square = x.dim() >= 2 and x.shape[-1] == x.shape[-2]
    return sparse.tril() + sparse.tril(-1).mT if square else sparse


def nonfinite(x: Tensor) -> Tensor:
    """A NaN, and infinities of both signs, in different rows where there are several."""
    x = x.clone()
    rows = x.view(-1, x.shape[-1]) if x.dim() else x.view(1, 1)
    for index, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        row = index * len(rows) // 3
        rows[row, (row + index) % rows.shape[1]] = value
    return x


FAMILIES: dict[str, Callable[[Tensor], Tensor]] = {
    f.__name__: f for f in (integers, corners, large, small, offset, constant_rows, structured, nonfinite)
}
# These show most: without `thorough` there are no others. `small` shows an eps of statistics over a whole batch, too.
FEW = {"corners", "large", "small"}
FEW_WITH_GRADIENTS = {"corners", "small", "offset"}  # `offset` reaches bounds of gradients
WITH_TARGETS = {"small"}
FORWARD_ONLY = {"large", "nonfinite"}  # gradients overflow, or are NaN whatever computes them


def of(family: str, batch: Batch, targets: int, bounded: Collection[str] = ()) -> Batch:
    """The batch as one of this family, but for inputs with a range of their own; itself where nothing changes."""
    if family not in FAMILIES:
        return batch
    change, named = FAMILIES[family], list(tensors_of(batch).items())
    real = ((name, t) for name, t in named[: len(named) - targets] if t.is_floating_point() and sparse.nbytes(t))
    inputs = {id(t) for name, t in real if name not in bounded and not is_binary(t)}
    return map_batch(lambda t: sparse.like(t, change) if id(t) in inputs else t, batch) if inputs else batch


def is_binary(x: Tensor) -> bool:
    """Whether `x` is a mask of zeros and ones, or holds labels of −1 and 1.

    Only on such values do `x * mask` and `where(mask > 0, x, 0)` agree.
    """
    if sparse.is_sparse(x) or x.is_nested or not x.numel():
        return False
    some = x.flatten()[:FIRST].abs()
    if not bool(((some == 0) | (some == 1)).all()):
        return False
    low = x.min()
    return float(low) in (0.0, -1.0) and bool(((x == low) | (x == 1)).all()) and bool((x == 1).any())


def exchanged(first: Batch, second: Batch) -> list[Batch]:
    """`first`, then for each of its inputs `first` with that one from `second` (of more than `EXCHANGES`, for several
    at a time, as `together` says), and last with half of each; all at once where sizes differ."""
    if not fitting(first, second):
        return [first, second]
    return [first, *(swapped(first, second, names) for names in together(first)), half_new(first, second)]


def half_new(first: Batch, second: Batch) -> Batch:
    """`second`, with the first half of each real tensor from `first`: a result that is remembered by a part of an
    input shows. Integers may be an order, or ends of ranges."""
    ours, names = tensors_of(first), {id(tensor): name for name, tensor in tensors_of(second).items()}

    def mixed(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point() or sparse.is_sparse(tensor):
            return tensor
        old, new = ours[names[id(tensor)]].flatten(), tensor.flatten()
        return torch.cat([old[: len(old) // 2], new[len(old) // 2 :]]).view(tensor.shape)

    return map_batch(mixed, second)


def together(batch: Batch) -> list[list[str]]:
    """The inputs that are exchanged at the same time."""
    names = list(tensors_of(batch))
    return [names[start::EXCHANGES] for start in range(min(EXCHANGES, len(names)))]


def fitting(first: Batch, second: Batch) -> bool:
    ours, theirs = tensors_of(first), tensors_of(second)
    return all(tensor.shape == theirs[name].shape for name, tensor in ours.items())


def swapped(first: Batch, second: Batch, names: Collection[str]) -> Batch:
    """`first` with some of its tensors from `second`."""
    ours, theirs = {id(tensor): name for name, tensor in tensors_of(first).items()}, tensors_of(second)
    return map_batch(lambda t: theirs[ours[id(t)]] if ours[id(t)] in names else t, first)


def half_refilled(memory: Batch, batch: Batch) -> Batch:
    """The batch in the memory of an earlier one, which keeps half of its values, where that fits."""
    return refilled(memory, half_new(memory, batch) if fitting(memory, batch) else batch)


def refilled(memory: Batch | None, batch: Batch) -> Batch:
    """The batch in the memory of an earlier one, where that fits."""
    if memory is None:
        return batch
    places, values = tensors_of(memory), tensors_of(batch)
    if not all(sparse.fits(places[name], value) for name, value in values.items()):
        return batch
    kept = {id(value): sparse.fill(places[name], value) for name, value in values.items()}
    return map_batch(lambda t: kept[id(t)], batch)


def with_gaps(tensor: Tensor) -> Tensor:
    """Equal values, every second place in memory (of rows where there are any)."""
    if not tensor.dim() or sparse.is_sparse(tensor):
        return tensor
    apart = tensor.new_zeros((*tensor.shape[:-1], 2 * tensor.shape[-1]))[..., ::2]
    return apart.copy_(tensor)
