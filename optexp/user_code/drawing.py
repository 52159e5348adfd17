"""Where a user's inputs are drawn: 30 MB of random numbers take the host 0.1 s for every batch, a card none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from optexp.support import sparse

LARGE = 2**22  # bytes of a batch: the host draws them in 15 ms

Inputs = Callable[[Mapping[str, int], torch.device], Any]


def drawing(inputs: Inputs, sizes: Mapping[str, int], device: torch.device) -> Inputs:
    """The function that draws batches: `inputs`, or, for large ones that allow it, the same on the default device.

    Every process gets the same answer. The seed of the draws is set by the caller afterwards.

    Args:
        inputs: The user's, of sizes and a device.
        sizes: Named sizes.
        device: Of the batches.
    """
    if device.type == "cpu" or outline(inputs, sizes) <= LARGE:
        return inputs
    try:
        on(device, inputs, sizes, device)
    except torch.OutOfMemoryError:
        raise
    except Exception:  # as where numbers of the host meet some of the device
        return inputs
    return partial(on, device, inputs)


def on(default: torch.device, inputs: Inputs, sizes: Mapping[str, int], device: torch.device) -> Any:
    """The user's inputs, made with torch's default device set to `default`."""
    with default:
        return inputs(sizes, device)


def outline(inputs: Inputs, sizes: Mapping[str, int]) -> int:
    """Bytes of a batch, from meta tensors; 0 where the user's code needs values."""
    try:
        made = on(torch.device("meta"), inputs, sizes, torch.device("meta"))
    except Exception:
        return 0
    return sum(sparse.nbytes(leaf) for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
