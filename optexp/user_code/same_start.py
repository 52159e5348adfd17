"""Parameters of two implementations with other names, told by the values that both draw from one seed.

KernelBench asks a second implementation for no names: its constructor draws the same values as the first one's.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from optexp.python_state.slots import tensors_in
from optexp.user_code.adapters import Maker, seed_all

SEED = 42


def renamed(old: nn.Module, new: Maker, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """New names of the old model's tensors, where every one has a partner of the same values; else none.

    Equal values in several tensors, as of biases that begin with zeros, are told by their order.

    Args:
        old: The first implementation; its class is made anew.
        new: Makes the second.
        args, kwargs: What the first is made with.
    """
    try:
        with own_generators():
            seed_all(SEED)
            ours = tensors_in(type(old)(*args, **kwargs))
            seed_all(SEED)
            theirs = tensors_in(new())
    except torch.OutOfMemoryError:
        raise
    except Exception:  # its class takes something else; the names say what does not fit
        return {}
    found: dict[str, str] = {}
    for name, tensor in ours.items():
        free = (other for other, value in theirs.items() if other not in found.values() and _equal(tensor, value))
        partner = next(free, None)
        if partner is None:
            return {}
        found[name] = partner
    return found


@contextmanager
def own_generators() -> Iterator[None]:
    """Inside, generators of torch (the CPU's), numpy and Python may be seeded; then they are as they were."""
    before = random.getstate(), numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(before[0])
            numpy.random.set_state(before[1])


def _equal(ours: Tensor, theirs: Tensor) -> bool:
    return ours.dtype is theirs.dtype and ours.layout is theirs.layout and torch.equal(ours, theirs)
