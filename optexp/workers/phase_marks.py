"""ARM: ranges around the phases of a step: feed, forward, loss, backward, optimizer. The timed process has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any

import torch

from optexp.program import Program
from optexp.support.ranges import phase

BACKWARD = ("backward", "grad")  # of torch.autograd; Tensor.backward calls the first


@contextmanager
def phases(program: Program) -> Iterator[Program]:
    """Yields the same program with a range around each phase; inside, backward passes and optimizer steps are ranges
    wherever they are called, as in a user's own training step. What a graph replays has no phases."""
    loss = program.loss
    with (
        _each(torch.autograd, BACKWARD, "backward"),
        _each(program.optimizer, ("step",), "optimizer"),
        _each(program.scaler, ("step", "update"), "optimizer"),
    ):
        yield replace(
            program,
            forward=_within("forward", program.call),
            loss=None if loss is None else _within("loss", loss),
        )


def _within(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def marked(*args: Any, **kwargs: Any) -> Any:
        with phase(name):
            return function(*args, **kwargs)

    return marked


@contextmanager
def _each(owner: Any, names: tuple[str, ...], called: str) -> Iterator[None]:
    """Functions of an object are ranges while the block runs; none of them where there is no object."""
    if owner is None:
        yield
        return
    own = {name: vars(owner)[name] for name in names if name in vars(owner)}
    for name in names:
        function = getattr(owner, name)
        setattr(owner, name, wraps(function)(_within(called, function)))
    try:
        yield
    finally:
        for name in names:
            if name in own:
                setattr(owner, name, own[name])
            else:
                delattr(owner, name)
