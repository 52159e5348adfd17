"""Hooks that a step registers are put back as what else it changes: each repetition registers them anew."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from optexp.program import Snapshot
from optexp.result import Verdict
from optexp.support.hooks import takes_hooks
from tests.equivalence.conftest import Net
from tests.user_code.test_rare_steps import compared

PROGRAM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
        AT_ONCE

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))

get_inputs = lambda: [torch.randn(16, 8), torch.randint(4, (16,))]
get_optimizer = lambda params: torch.optim.SGD(params, lr=0.1)
handle, calls = None, 0

def clip(parameter):
    parameter.grad.clamp_(-0.01, 0.01)

def train_step(model, batch, optimizer):
    global handle, calls
    calls += 1
    if calls == 1:
        IN_THE_FIRST_CALL
    if handle is not None and calls == 3:
        handle.remove()
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
"""
HALVED = "for p in {}.parameters(): p.register_hook(lambda g: g / 2)"
LARGER = "{}.first.register_forward_hook(lambda module, inputs, output: output * 1.5)"
LESS = "{}.second.register_full_backward_hook(lambda module, into, out: (into[0] / 2,))"
CLIPPED = "for p in {}.parameters(): p.register_post_accumulate_grad_hook(clip)"
SLOW = pytest.mark.slow


def later(hook: str) -> str:
    return PROGRAM.replace("AT_ONCE", "pass").replace("IN_THE_FIRST_CALL", hook.format("model"))


def at_once(hook: str) -> str:
    return PROGRAM.replace("AT_ONCE", hook.format("self")).replace("IN_THE_FIRST_CALL", "pass")


@pytest.mark.parametrize(
    "hook",
    [
        pytest.param(HALVED, id="of gradients"),
        pytest.param(LARGER, id="of a forward", marks=SLOW),
        pytest.param(LESS, id="of a backward", marks=SLOW),
        pytest.param(CLIPPED, id="of accumulated gradients", marks=SLOW),
    ],
)
def test_hooks_of_the_first_call_are_those_of_later_ones(hook: str, tmp_path: Path) -> None:
    result = compared(tmp_path, at_once(hook), later(hook))
    assert result.verdict is Verdict.VERIFIED, result.headline
    result = compared(tmp_path, later(hook), at_once(hook))
    assert result.verdict is Verdict.VERIFIED, result.headline


@pytest.mark.parametrize(
    ("hook", "other"),
    [
        pytest.param(HALVED, HALVED.replace("/ 2", "/ 1.9"), id="another factor"),
        pytest.param(HALVED, "pass", id="no hook", marks=SLOW),
        pytest.param(LARGER, LARGER.replace("1.5", "1.51"), id="another output", marks=SLOW),
        pytest.param(CLIPPED, CLIPPED.replace("clip", "lambda p: None"), id="no clip", marks=SLOW),
    ],
)
def test_other_hooks_are_another_step(hook: str, other: str, tmp_path: Path) -> None:
    result = compared(tmp_path, later(other), later(hook))
    assert result.verdict is Verdict.NOT_EQUIVALENT, result.headline


@pytest.mark.parametrize(
    ("at", "verdict"),
    [(3, Verdict.VERIFIED), pytest.param(2, Verdict.NOT_EQUIVALENT, marks=SLOW)],
    ids=["alike", "a step earlier"],
)
def test_a_handle_removes_its_hook_when_it_did(at: int, verdict: Verdict, tmp_path: Path) -> None:
    program = later(f"handle = {LARGER}")
    result = compared(tmp_path, program.replace("calls == 3", f"calls == {at}"), program)
    assert result.verdict is verdict, result.headline


def test_hooks_are_put_back_and_those_that_watch_a_step_stay() -> None:
    program = Net("train").build(torch.device("cpu"), torch.float32, 0)
    linear: Any = program.model[8]

    def halved(module: nn.Module, inputs: Any, output: Any) -> Any:
        return output / 2

    gone = linear.register_forward_hook(halved)
    snapshot = Snapshot(program)
    gone.remove()
    linear.register_forward_hook(halved)
    linear.bias.register_hook(lambda gradient: gradient / 2)
    watching = linear.register_forward_hook(partial(takes_hooks))  # any function of this project's
    snapshot.restore(program)
    assert {*linear._forward_hooks} == {gone.id, watching.id}
    assert not linear.bias._backward_hooks
