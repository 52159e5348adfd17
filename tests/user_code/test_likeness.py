"""Objects that a step's first call makes are compared by what they hold."""

from __future__ import annotations

import copy
from collections import defaultdict, deque, namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from optexp.python_state.likeness import alike, lacking, rearranged, same_start, unseen

UNIT = 2.0**-24


@dataclass
class Average:
    """As an averaged model is kept: the network, and how often it was updated."""

    network: nn.Module
    updates: int = 0


def network() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def optimizer() -> torch.optim.Optimizer:
    torch.manual_seed(0)
    return torch.optim.SGD(network().parameters(), lr=0.1)


def moved(made: Any, share: float) -> Any:
    """The same object after a step that changes it by a share of itself."""
    after = copy.deepcopy(made)
    with torch.no_grad():
        match after:
            case Average():
                after.network, after.updates = moved(after.network, share), after.updates + 1
            case nn.Module():
                for parameter in after.parameters():
                    parameter.mul_(1 + share)
            case _:
                after.param_groups[0]["lr"] *= 1 + share
    return after


@pytest.mark.parametrize("make", [network, lambda: Average(network()), optimizer])
def test_another_change_of_an_object_is_seen(make: Callable[[], Any]) -> None:
    inside = make()
    wrong, right, again = (moved(inside, share) for share in (0.02, 0.01, 0.01))
    assert alike((inside, again), (inside, right), UNIT, [])
    assert not alike((inside, wrong), (inside, right), UNIT, [])
    assert alike(({"it": inside}, {"it": again}), ({"it": inside}, {"it": right}), UNIT, [])
    assert not alike(({"it": inside}, {"it": wrong}), ({"it": inside}, {"it": right}), UNIT, [])


def test_a_count_in_an_object_is_exact() -> None:
    before, after = Average(network(), 3), Average(network(), 4)
    assert not alike((before, Average(network(), 5)), (before, after), UNIT, [])


def test_options_of_an_optimizers_implementation_are_no_result() -> None:
    def stepped(**options: Any) -> list[dict[str, Any]]:
        parameter = nn.Parameter(torch.ones(4))
        optimizer = torch.optim.Adam([parameter], **options)
        before = optimizer.state_dict()
        parameter.grad = torch.ones(4)
        optimizer.step()
        return [before, optimizer.state_dict()]

    plain = stepped()
    assert alike(stepped(fused=True), plain, UNIT, [])
    assert alike(stepped(foreach=True), plain, UNIT, [])
    assert not alike(stepped(fused=True, amsgrad=True), plain, UNIT, [])


def test_networks_pair_their_tensors_by_name() -> None:
    """A rewritten graph registers its parts in the order of their calls."""
    inside, traced = network(), nn.Linear(8, 8)
    traced._parameters = dict(reversed(inside._parameters.items()))
    right, wrong = moved(traced, 0.01), moved(traced, 0.02)
    assert alike((traced, right), (inside, moved(inside, 0.01)), UNIT, [])
    assert not alike((traced, wrong), (inside, moved(inside, 0.01)), UNIT, [])


def test_classes_and_factories_of_each_process_are_the_same_containers() -> None:
    """As a script's replay memory holds them, which each process defines anew."""

    def filled(reward: float) -> Any:
        transition = namedtuple("transition", ("state", "following", "reward"))
        memory = deque([transition(torch.ones(2), None, 0.5)], maxlen=4)
        memory.append(transition(torch.zeros(2), torch.ones(2), reward))
        scores = defaultdict(lambda: deque(maxlen=2))
        scores["first"].append(reward)
        return [memory, scores]

    assert alike([filled(0.0), filled(1.0)], [filled(0.0), filled(1.0)], UNIT, [])
    assert not alike([filled(0.0), filled(2.0)], [filled(0.0), filled(1.0)], UNIT, [])
    assert not alike([filled(0.0), filled(1.0)[:1]], [filled(0.0), filled(1.0)], UNIT, [])


def test_runs_of_other_steps_began_with_other_counts() -> None:
    assert same_start(([1.5, 3], [2.0, 4]), ([1.25, 3], [8.0, 9]))
    assert not same_start(([1.5, 3], [2.0, 4]), ([1.5, 0], [2.0, 1]))
    assert not same_start((None, [2.0]), ([1.5], [2.0]))


def test_arms_that_made_many_steps_may_have_drifted_apart() -> None:
    theirs = [8.0, 40], [9.0, 41]
    assert not alike(([8.01, 40], [9.02, 41]), theirs, 2.0**-24, ())
    assert alike(([8.01, 40], [9.02, 41]), theirs, 2.0**-24, (), drifted=True)
    assert not alike(([8.0, 40], [9.02, 41]), theirs, 2.0**-24, (), drifted=True)
    assert not alike(([8.0, 40], [9.0, 40]), theirs, 2.0**-24, (), drifted=True)
    assert alike(([8.0, 38], [9.0, 40]), theirs, 2.0**-24, (), drifted=True)


def test_values_have_counterparts_by_any_name() -> None:
    """Counts by how far they move, numbers as closely as by name, and nothing by another shape or another thing."""
    start, move = torch.randn(32, generator=torch.Generator().manual_seed(0)), 0.01 * torch.ones(32)
    theirs = {"a": start, "calls": 3}, {"a": start + move, "calls": 4}
    same = [start.clone(), 7], [start + move, 8]
    for drifted in (False, True):
        assert lacking([same], theirs, drifted=drifted) == []
        assert lacking([], theirs, drifted=drifted) == [True, False]
        for before, change in ((start, 1.2 * move), (start + 1, 0.5 * move), (torch.ones(4), torch.ones(4))):
            other = [before, 7], [before + change, 9]
            assert lacking([other], theirs, drifted=drifted) == [True, False]


def test_rows_of_a_ring_are_those_of_a_deque() -> None:
    rows = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    ring = {"x": torch.zeros(4, 3)}, {"x": torch.cat([rows[4:], rows[2:4]])}
    before, after = deque(rows[:0].unbind(), maxlen=4), deque(rows[2:].unbind(), maxlen=4)
    other = deque([*rows[2:5].unbind(), 1.001 * rows[5]], maxlen=4)
    assert rearranged([(before, after)], ring, UNIT)
    assert rearranged([ring], (before, after), UNIT)
    assert not rearranged([(before, other)], ring, UNIT)
    assert not rearranged([ring], (before, other), UNIT)
    assert rearranged([], ring, UNIT) is False
    assert rearranged([ring], (after, deque([*[*after][1:], after[0]])), UNIT) is None
    rewards = (torch.zeros(4), torch.tensor([0.5, 1.5, 0.0, 0.0])), (deque(), deque([0.5, 1.5]))
    assert rearranged(rewards[1:], rewards[0], UNIT)
    assert rearranged(rewards[:1], rewards[1], UNIT)


def test_numbers_that_noise_moves_show_nothing() -> None:
    theirs = [1.0, 1.0, 3], [2.0, 2.0, 4]
    ours = [1.0, 1.0, 3], [2.9, 2.0, 4]
    assert unseen(ours, theirs, UNIT, [0.2, 0.0, 0.0])
    assert not unseen(ours, theirs, UNIT, [0.01, 0.5, 0.0])
    assert not unseen(ours, theirs, UNIT, [])
    assert not unseen(theirs, theirs, UNIT, [0.2])
    assert not unseen(([1.0, 1.0, 3], [2.9, 2.0, 5]), theirs, UNIT, [0.2])
