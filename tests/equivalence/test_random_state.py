"""States of generators that a model holds."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from optexp.errors import NoReference
from optexp.program import Program
from optexp.python_state import records
from optexp.support.random_state import same_states, seed, state_of

BITS = [numpy.random.MT19937, numpy.random.PCG64, numpy.random.PCG64DXSM, numpy.random.Philox, numpy.random.SFC64]
DRAWS: list[tuple[Callable[[], Any], Callable[[Any], object]]] = [
    *((partial(lambda kind: numpy.random.Generator(kind(3)), kind), lambda held: held.normal()) for kind in BITS),
    *((partial(lambda kind: numpy.random.RandomState(kind(3)), kind), lambda held: held.normal()) for kind in BITS),
    *((partial(kind, 3), lambda held: numpy.random.Generator(held).normal()) for kind in BITS),
    (partial(random.Random, 3), lambda held: held.gauss(0, 1)),
    (torch.Generator, lambda held: torch.rand(1, generator=held)),
]


class Holder(nn.Module):
    def __init__(self, held: Any, draw: Callable[[Any], object] | None) -> None:
        super().__init__()
        self.held, self.draw = held, draw

    def forward(self, x: Tensor) -> Tensor:
        if self.draw is not None:
            self.draw(self.held)
        return x


@pytest.mark.parametrize(("make", "draw"), DRAWS)
def test_a_draw_is_seen_and_undone(make: Callable[[], Any], draw: Callable[[Any], object]) -> None:
    idle, drawing = Holder(make(), None), Holder(make(), draw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model, changed in ((idle, False), (drawing, True)):
            before = records.table({"": model}, [])
            state = state_of(model.held)
            assert state is not None
            first = state[0]()
            model(torch.ones(1))
            assert bool(before.changes(records.table({"": model}, []))) is changed
            assert same_states(first, state[0]()) is not changed
            before.restore()
            assert same_states(first, state[0]())


def test_it_seeds_as_torch_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever code under test has put in the place of torch's generator."""
    monkeypatch.setattr(torch, "default_generator", torch.Generator())
    with torch.random.fork_rng(devices=[]):
        for number in (0, 7, -1, 2**63):
            torch.manual_seed(number)
            expected = torch.rand(3)
            seed(number)
            assert torch.equal(torch.rand(3), expected)


class Dropped(nn.Module):
    """A layer that is left out now and then, by a generator beside torch's: hardly ever while somebody looks."""

    draw = staticmethod(random.random)

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) if self.draw() < 1 - 1e-9 else x


class DroppedByNumpy(Dropped):
    draw = staticmethod(lambda: float(numpy.random.rand()))


@pytest.mark.parametrize("make", [Dropped, DroppedByNumpy])
def test_a_model_that_draws_from_generators_beside_torch_is_undecided_where_a_candidate_draws_otherwise(
    check, net, make
) -> None:
    def never(program: Program) -> Program:
        program.model.draw = lambda: 0.0
        return program

    assert check(net(mode="forward", make=make)).ok
    with pytest.raises(NoReference, match="the candidate's draws other numbers, or none"):
        check(net(mode="forward", make=make), never)
