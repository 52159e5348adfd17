"""Where a user's inputs are drawn: gigabytes of random numbers take the host seconds for every batch, a card none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

LARGE = 2**28  # bytes of a batch

Inputs = Callable[[Mapping[str, int], torch.device], Any]


def drawing(inputs: Inputs, sizes: Mapping[str, int], device: torch.device) -> Inputs:
    """What draws the batches: `inputs` or, where they are large and it can be done, the same on the device by default.

    Every process that asks gets the same answer. What is drawn does not depend on it having been asked: the caller sets
    the seed afterwards.
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
    """Tensors are made on the default device where the user's code names none."""
    with default:
        return inputs(sizes, device)


def outline(inputs: Inputs, sizes: Mapping[str, int]) -> int:
    """Bytes of a batch, without one being made; 0 where the user's code needs the values."""
    try:
        made = on(torch.device("meta"), inputs, sizes, torch.device("meta"))
    except Exception:
        return 0
    return sum(leaf.nbytes for leaf in tree_leaves(made) if isinstance(leaf, Tensor))
