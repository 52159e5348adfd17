"""Optimizer state that does not begin as zeros is put back to what the optimizer's own code writes first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optexp.program import Program, ResidentFeed, Snapshot, first, prime, train
from optexp.result import Verdict
from optexp.strategies.replace import hand_over
from tests.user_code.test_rare_steps import compared

ADAM = """
import torch
from torch import nn

def Model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

def get_inputs():
    return [torch.randn(8, 4), torch.randn(8, 2)]

class Own(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if not state:
                state["step"] = 0
                state["m"], state["v"] = torch.zeros_like(p), torch.eye(p.shape[0])
            state["step"] += 1
            state["m"].mul_(0.9).add_(p.grad, alpha=0.1)
            rows = p.grad.reshape(p.shape[0], -1)
            state["v"].lerp_(rows @ rows.T, 0.01)
            m = state["m"] / (1 - 0.9 ** state["step"])
            p.sub_(1e-3 * (state["v"] @ m.reshape(rows.shape)).reshape(p.shape))

def get_optimizer(params):
    return Own(params)

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.mse_loss(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
"""


class Assigned(torch.optim.Optimizer):
    """The state of a parameter is assigned as a whole."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def begin(self, p: Tensor) -> None:
        if p not in self.state:
            most = torch.full_like(p, 2.0)
            self.state[p] = {"slow": p.clone(), "power": 1.0, "most": most, "count": 3}
        self.state[p]["count"] += 1

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            self.begin(p)
            state = self.state[p]
            state["most"].mul_(1.5)
            state["power"] *= 0.9
            p.sub_(0.1 * p.grad + 0.01 * state["slow"] * state["power"])
            state["slow"].lerp_(p, 0.5)


class Momentum(Assigned):
    """An average that begins as the first gradient begins as zeros, and so it does with a decay beside the gradient."""

    def begin(self, p: Tensor) -> None:
        super().begin(p)
        state, direction = self.state[p], p.grad + 0.1 * p if p.grad is not None else p
        if "average" not in state:
            state["average"] = direction.clone()
        else:
            state["average"].mul_(0.9).add_(direction)


class OneByOne(Assigned):
    """Each entry is made for itself, and a count is written once it is one further."""

    def begin(self, p: Tensor) -> None:
        state = self.state[p]
        if not state:
            state["slow"] = p.clone()
            state.update(power=1.0)
        state.setdefault("most", torch.full_like(p, 2.0))
        state["count"] = state.get("count", 3) + 1


@pytest.mark.parametrize("kind", [Assigned, OneByOne, Momentum])
def test_state_begins_as_the_optimizer_writes_it(kind: type[Assigned]) -> None:
    model = nn.Linear(3, 2)
    optimizer, feed = kind(model.parameters()), ResidentFeed(torch.device("cpu"))
    feed.reset([(torch.randn(4, 3),)])
    program = Program(model, train, feed, loss=lambda output, _: output.square().mean(), optimizer=optimizer)
    weight = model.weight.detach().clone()
    start = Snapshot(program)
    prime(program)
    first = _trained(program)
    start.restore(program)
    state = optimizer.state[model.weight]
    assert type(state) is dict, "as the optimizer makes it"
    assert (state["count"], state["power"]) == (3, 1.0)
    assert torch.equal(state["slow"], weight)
    assert torch.equal(state["most"], torch.full((2, 3), 2.0))
    assert not state.get("average", torch.zeros(())).any()
    assert all(map(torch.equal, _trained(program), first))


def _trained(program: Program) -> list[Tensor]:
    for _ in range(3):
        program.run()
    return [tensor.clone() for tensor in program.state().values()]


def test_running_powers_in_the_place_of_a_count_are_verified(tmp_path: Path) -> None:
    second = ADAM.replace('state["step"] = 0', 'state["power"] = 1.0').replace(
        'state["step"] += 1', 'state["power"] *= 0.9'
    )
    result = compared(tmp_path, second.replace('0.9 ** state["step"]', 'state["power"]'), ADAM)
    assert result.verdict is Verdict.VERIFIED, result.headline


def test_another_first_value_is_another_optimizer(tmp_path: Path) -> None:
    result = compared(tmp_path, ADAM.replace("torch.eye(p.shape[0])", "1.1 * torch.eye(p.shape[0])"), ADAM)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline


def test_first_values_go_with_the_parameter_in_another_ones_place() -> None:
    model, other = nn.Linear(3, 2), nn.Parameter(torch.ones(3, 2))
    optimizer, feed = Assigned([model.weight]), ResidentFeed(torch.device("cpu"))
    prime(Program(model, train, feed, optimizer=optimizer))
    hand_over(optimizer, {model.weight: (other, True)})
    assert first(optimizer, other, "power") == 1.0
    slow = first(optimizer, other, "slow")
    assert isinstance(slow, Tensor)
    assert torch.equal(slow, model.weight.t())
    assert first(optimizer, model.weight, "power") is None
