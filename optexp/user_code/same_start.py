"""Parameters of two implementations with other names, told by the values that both draw from one seed.

KernelBench asks a second implementation for no names: its constructor draws the same values as the first one's.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from optexp.python_state.slots import tensors_in
from optexp.user_code.adapters import Maker, seed_all

SEED = 42
WORDS = re.compile("[a-z]+")


def renamed(old: nn.Module, new: Maker, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
    """New names of the old model's tensors, where every one has a partner of the same values; else none.

    Args:
        old: The first implementation; its class is made anew.
        new: Makes the second.
        args, kwargs: What the first is made with.
    """
    found = same_values(lambda: type(old)(*args, **kwargs), new)
    return found if found.keys() == tensors_in(old).keys() else {}


def same_values(first: Callable[[], nn.Module], second: Callable[[], nn.Module]) -> dict[str, str]:
    """By the names of the first model's tensors, those of the second's; none where one has no partner.

    Equal values in several tensors, as of biases that begin with zeros, are told by their names, or by words in them
    (`first.bias` is `bias_first`), and else by their order.

    Args:
        first, second: Each makes a model, from the same seed.
    """
    try:
        with own_generators():
            seed_all(SEED)
            ours = first()
            seed_all(SEED)
            theirs = second()
            found = matched(parameters(ours), parameters(theirs)) | matched(buffers(ours), buffers(theirs))
    except torch.OutOfMemoryError:
        raise
    except Exception:  # its class takes something else; the names say what does not fit
        return {}
    return found if found.keys() == tensors_in(ours).keys() else {}


def parameters(model: nn.Module) -> Mapping[str, Tensor]:
    return dict(model.named_parameters())


def buffers(model: nn.Module) -> Mapping[str, Tensor]:
    return dict(model.named_buffers())


def matched(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> dict[str, str]:
    """Partners of equal values: of the most similar names, else of the same order."""
    equal = [
        (-similarity(name, other), index, place, name, other)
        for index, (name, tensor) in enumerate(ours.items())
        for place, (other, value) in enumerate(theirs.items())
        if _equal(tensor, value)
    ]
    found: dict[str, str] = {}
    for _, _, _, name, other in sorted(equal):
        if name not in found and other not in found.values():
            found[name] = other
    return found


def similarity(name: str, other: str) -> float:
    """Words in both names; numbers, which may count anything, are no words."""
    if name == other:
        return inf
    return len({*WORDS.findall(name.lower())} & {*WORDS.findall(other.lower())})


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
    return ours.dtype is theirs.dtype and ours.layout is theirs.layout and torch.equal(ours.cpu(), theirs.cpu())
