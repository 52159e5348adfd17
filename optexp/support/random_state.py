"""Generators of random numbers, of torch, numpy or Python: how to read, put back, compare and seed them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy
import torch
from torch import default_generator  # as torch.manual_seed holds it: code under test may replace torch's name


def state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """What reads its state, a new object each time, and what puts it back; None where it is no generator."""
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


def seed(number: int) -> None:
    """Seed torch's default generators, as `torch.manual_seed` does, which formats three stacks where CUDA is not yet in
    use: milliseconds."""
    default_generator.manual_seed(number)
    if torch.cuda.is_initialized() or torch.cuda.is_available():
        torch.cuda.manual_seed_all(number)


@contextmanager
def put_back(device: torch.device) -> Iterator[None]:
    """Put torch's default generators, of the CPU and of `device`, back afterwards."""
    there = [torch.get_rng_state()] + ([torch.cuda.get_rng_state(device)] if device.type == "cuda" else [])
    try:
        yield
    finally:
        torch.set_rng_state(there[0])
        for state in there[1:]:
            torch.cuda.set_rng_state(state, device)


def seed_all(seed: int) -> None:
    """Seed the generators of random numbers that a user's code may use: Python's, numpy's and torch's."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
