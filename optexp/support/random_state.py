"""Random number generators of torch, numpy and Python: read, restore, compare and seed their states."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import default_generator  # bound at import, as code under test may replace torch's name


def state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """Functions that read a generator's state (a new object each time) and restore it; None for any other value."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.SystemRandom):  # the system's entropy has no state
        return None
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, numpy.random.RandomState):
        return partial(value.get_state, legacy=False), value.set_state
    bits = value.bit_generator if isinstance(value, numpy.random.Generator) else value
    if isinstance(bits, numpy.random.BitGenerator):
        return partial(getattr, bits, "state"), partial(setattr, bits, "state")
    return None


def same_states(ours: Any, theirs: Any) -> bool:
    """Whether two states that `state_of` read are equal: tensors, arrays and numbers, in dictionaries and tuples."""
    if type(ours) is not type(theirs):
        return False
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, numpy.ndarray):
        return numpy.array_equal(ours, theirs)
    if isinstance(ours, dict):
        return ours.keys() == theirs.keys() and all(same_states(ours[key], theirs[key]) for key in ours)
    if isinstance(ours, tuple) and any(isinstance(part, numpy.ndarray) for part in ours):
        return len(ours) == len(theirs) and all(map(same_states, ours, theirs))
    return bool(ours == theirs)


def of_host() -> tuple[Any, Any]:
    """States of the global generators of Python and numpy."""
    return random.getstate(), numpy.random.get_state(legacy=False)


def seed(number: int) -> None:
    """Seed torch's default generators. `torch.manual_seed` does the same, but takes milliseconds before CUDA is in use:
    it then formats three stacks."""
    default_generator.manual_seed(number)
    if torch.cuda.is_initialized() or torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


@contextmanager
def put_back(device: torch.device) -> Iterator[None]:
    """Restore torch's default generators, of the CPU and of `device`, after the block."""
    states = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    try:
        yield
    finally:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, device)


def seed_all(seed: int) -> None:
    """Seed the random number generators of Python, numpy and torch, which a user's code may use."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
