"""ARM, REFERENCE: the first batches that a feed gives, in numbers that another process can compare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from optexp.equivalence.tensor_math import name_of
from optexp.program import Batch, Feed, tensors_of
from optexp.support import sparse
from optexp.support.pausing import Used
from optexp.workers.arm_timing import digest_of
from optexp.workers.messages import Fed, Given

MOST, LEAST, LIMIT_S = 64, 2, 4.0  # batches of a loader, and seconds after which no more are taken
ITERATED = 512  # batches of an iterated data set, which cannot be asked for later ones
SHOWN = 4096  # elements of an input that are shown, evenly spread


def first_batches(feed: Feed, take: Callable[[], Batch], own: int) -> Fed:
    """Take the first batches of a feed that has just begun.

    Args:
        take: Gives the next batch.
        own: Number of batches that the core has drawn for it; the most that are taken where there is no loader.
    """
    loader: Any = getattr(innermost(feed), "loader", None)
    found, used, most = list[Given](), Used(), own if loader is None else MOST
    if loader is not None and isinstance(loader.dataset, IterableDataset):
        most = ITERATED
    while len(found) < most and (len(found) < LEAST or used.seconds() < LIMIT_S):
        found.append(given(take()))
    if loader is None:
        return Fed(False, None, None, found)
    by_sample = loader.batch_size is not None
    return Fed(True, length_of(loader), length_of(loader.sampler) if by_sample else None, found)


def innermost(feed: Any) -> Any:
    """The feed that others are around."""
    while hasattr(feed, "feed"):
        feed = feed.feed
    return feed


def later(feed: Feed, positions: Collection[int]) -> Iterator[tuple[int, Batch]]:
    """Batches of an epoch at some positions, for a few seconds, of a feed that has just begun.

    None where the data set gives its items to worker processes alone.
    """
    used, picked = Used(), innermost(feed).picked(positions, LIMIT_S / 2)
    while used.seconds() < LIMIT_S:
        try:
            yield next(picked)
        except Exception:  # StopIteration too
            return


def given(batch: Batch) -> Given:
    """One batch in numbers."""
    tensors = tensors_of(batch)
    real = {name: tensor for name, tensor in tensors.items() if not tensor.is_complex() and tensor.numel()}
    return Given(
        shapes={name: list(tensor.shape) for name, tensor in tensors.items()},
        dtypes={name: name_of(tensor.dtype) for name, tensor in tensors.items()},
        means={name: float(_values(tensor).mean(dtype=torch.float64)) for name, tensor in real.items()},
        digest=digest_of(batch).hex(),
    )


def shown(batch: Batch) -> dict[str, list[float]]:
    """Evenly spread elements of each real input; every element of small ones."""
    found = {}
    for name, tensor in tensors_of(batch).items():
        if not tensor.is_complex() and not sparse.is_sparse(tensor):
            flat = tensor.detach().reshape(-1)
            found[name] = flat[:: stride(flat.numel())].to(torch.float64).tolist()
    return found


def stride(elements: int) -> int:
    """Distance of the elements that `shown` shows."""
    return max(1, -(-elements // SHOWN))


def length_of(sized: object) -> int | None:
    """Its length; None where it has none."""
    try:
        return len(sized)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):  # samplers and iterated data sets need not know
        return None


def _values(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if sparse.is_sparse(tensor) else tensor
