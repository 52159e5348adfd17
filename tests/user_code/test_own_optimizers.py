"""Steps with optimizers of their own, of which some calls step the model's and others do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from optexp.result import Verdict
from optexp.workloads.module import Module
from tests.user_code.test_rare_steps import compared

TWO = """
import torch
from torch import nn

critic = nn.Linear(2, 1)
made = []

def Model():
    return nn.Linear(4, 2)

def get_inputs():
    return [torch.randn(8, 4), torch.randn(8, 2)]

def train_step(model, batch, optimizer):
    if not made:
        made.extend(torch.optim.SGD(net.parameters(), lr=1e-2) for net in (critic, model))
        made.append(0)
    made[2] += 1
    made[0].zero_grad()
    loss = critic(model(batch[0]).detach()).mean() - critic(batch[1]).square().mean()
    loss.backward()
    made[0].step()
    if made[2] % 2 == 0:
        CLEAR
        nn.functional.mse_loss(model(batch[0]), batch[1]).backward()
        made[1].step()
    return loss
"""
CLEARS, ADDS = TWO.replace("CLEAR", "made[1].zero_grad()"), TWO.replace("CLEAR", "pass")


@pytest.mark.slow
def test_a_network_may_add_to_gradients_of_its_earlier_steps(tmp_path: Path) -> None:
    result = compared(
        tmp_path, ADDS.replace("mse_loss(model(batch[0]), batch[1])", "mse_loss(batch[1], model(batch[0]))"), ADDS
    )
    assert result.verdict is Verdict.VERIFIED, result.headline


def test_gradients_that_only_one_program_clears_are_seen(tmp_path: Path) -> None:
    result = compared(tmp_path, ADDS, CLEARS)
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline


def test_a_call_that_steps_no_optimizer_is_named(tmp_path: Path) -> None:
    first = CLEARS.replace("    made[0].step()\n", "    if made[2] % 3: made[0].step()\n")
    result = compared(tmp_path, first, first)
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "none of its optimizers" in result.headline


ACTOR = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(6, 1)

    def value(self, states, actions):
        return self.critic(torch.cat([states, actions], 1))

    def forward(self, states):
        return self.actor(states)

made = None

def get_inputs():
    return [torch.randn(8, 4), torch.randn(8, 2), torch.randn(8, 1)]

def train_step(model, batch, optimizer):
    global made
    if made is None:
        made = tuple(torch.optim.SGD(net.parameters(), lr=1e-2) for net in (model.critic, model.actor))
    states, actions, returns = batch
    made[0].zero_grad()
    nn.functional.mse_loss(model.value(states, actions), returns).backward()
    made[0].step()
    made[1].zero_grad()
    (-model.value(states, model(states)).mean()).backward()
    made[1].step()
"""
FROZEN = ACTOR.replace("    (-model", "    model.critic.requires_grad_(False)\n    (-model") + (
    "    model.critic.requires_grad_(True)\n"
)


def critic_gradients(file: Path, text: str) -> list[Tensor]:
    """Gradients of the critic that a step of the file shows."""
    file.write_text(text)
    workload = Module(mode="train", path=str(file))
    program = workload.build(torch.device("cpu"), torch.float32, 0)
    program.step(program, workload.batch(torch.Generator().manual_seed(0)))
    return [p.grad for p in program.model.get_submodule("critic").parameters() if p.grad is not None]


def test_a_later_loss_changes_no_gradient_that_was_taken(tmp_path: Path) -> None:
    adds, leaves = (critic_gradients(tmp_path / f"{i}.py", text) for i, text in enumerate((ACTOR, FROZEN)))
    assert len(leaves) == 2
    torch.testing.assert_close(adds, leaves, rtol=0, atol=0)


@pytest.mark.slow
def test_a_critic_may_be_frozen_for_the_loss_of_its_actor(tmp_path: Path) -> None:
    result = compared(tmp_path, FROZEN, ACTOR)
    assert result.verdict is Verdict.VERIFIED, result.headline
