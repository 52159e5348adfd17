"""Generators of random numbers that somebody's code holds, of torch, numpy or Python: how to read and put back each."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import torch


def state_of(value: Any) -> tuple[Callable[[], Any], Callable[[Any], object]] | None:
    """What reads its state and what puts it back; None where it is no generator."""
    if isinstance(value, torch.Generator):
        return value.get_state, value.set_state
    if isinstance(value, random.SystemRandom):  # the system's entropy has no state
        return None
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    if isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    if isinstance(value, numpy.random.Generator):
        return partial(getattr, value.bit_generator, "state"), partial(setattr, value.bit_generator, "state")
    return None
