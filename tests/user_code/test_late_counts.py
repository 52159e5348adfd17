"""What a training step does after thousands of steps shows once its counts are moved on to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.program.counters import move_on, numbers
from optexp.python_state.counts import moved_on, pace
from optexp.result import Verdict
from tests.user_code.test_rare_steps import compared

BEFORE = """
import torch
from torch import nn

calls = [0]

class Plain(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["k"] = state.get("k", 0) + 1
            p.sub_(self.param_groups[0]["lr"] * p.grad / (1 - 0.9 ** state["k"]))

def Model():
    return nn.Linear(4, 2)

def get_inputs():
    return [torch.randn(8, 4), torch.randint(2, (8,))]

def get_optimizer(params):
    return Plain(params)

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    calls[0] += 1
    optimizer.param_groups[0]["lr"] = 0.1 if calls[0] < 3000 else 0.01
    optimizer.step()
    if calls[0] % 500 == 0:
        model.bias.data.zero_()
    return loss
"""


def test_counts_grow_alike_in_each_step() -> None:
    assert pace([3, 4, 5]) == 1
    assert pace([torch.tensor(0.0), torch.tensor(32.0), torch.tensor(64.0)]) == 32
    assert not any(map(pace, ([3, 4, 4], [5, 4, 3], [True, 2, 3], [0.1, 1.1, 2.1], [None, 1, 2], ["a", "b", "c"])))


def test_values_that_are_no_counts_stay() -> None:
    later, paces = moved_on(
        [{"n": n, "loss": loss, "i": i} for n, loss, i in ((1, 0.5, 1), (2, 0.4, 2), (3, 0.2, 0))], 9
    )
    assert (later, paces) == ({"n": 12, "loss": 0.2, "i": 0}, {1})
    assert moved_on([[1], [2], [3, 4]], 9) == ([3, 4], set())


def test_counts_in_buffers_of_a_network_move_on_in_a_copy() -> None:
    seen = [torch.optim.swa_utils.AveragedModel(torch.nn.Linear(1, 1)) for _ in range(3)]
    for count, network in enumerate(seen):
        network.n_averaged.fill_(count)
    later, paces = moved_on(seen, 9)
    assert (later.n_averaged.item(), seen[-1].n_averaged.item(), paces) == (11, 2, {1})


def test_an_optimizers_counts_move_on_in_place() -> None:
    parameter = torch.zeros(2, requires_grad=True)
    optimizer, seen = torch.optim.Adam([parameter]), []
    for _ in range(3):
        parameter.grad = torch.ones(2)
        optimizer.step()
        seen.append(numbers(optimizer))
    step = optimizer.state[parameter]["step"]
    assert move_on(optimizer, seen, 100) == {1}
    assert step.item() == 103


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("% 500 == 0", "% 1000 == 999"),
        ("calls[0] < 3000", "True"),
        ('** state["k"]', '** min(state["k"], 2)'),
    ],
    ids=["at times", "a rate that never falls", "a correction that ends"],
)
def test_what_late_steps_do_otherwise_is_no_longer_verified(old: str, new: str, tmp_path: Path) -> None:
    assert old in BEFORE
    first = BEFORE.replace("0.9 **", "0.999 **") if "min" in new else BEFORE
    second = first.replace(old, new.replace("2)", "1000)"))
    result = compared(tmp_path, second, first)
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "with counts as they are after" in result.headline


def test_counts_that_are_kept_elsewhere_move_on_alike(tmp_path: Path) -> None:
    second = BEFORE.replace("calls = [0]", "class Trainer: pass\ncalls = Trainer()\ncalls.n = 0")
    second = second.replace("calls[0]", "calls.n").replace('"k"', '"count"')
    result = compared(tmp_path, second, BEFORE)
    assert result.verdict is Verdict.VERIFIED, result.headline


def test_a_step_that_does_not_work_so_late_is_left_alone(tmp_path: Path) -> None:
    first = BEFORE.replace("0.1 if calls[0] < 3000 else 0.01", "([0.1] * 400)[calls[0]]")
    result = compared(tmp_path, first, first)
    assert result.verdict is Verdict.VERIFIED, result.headline


def test_a_decay_that_an_average_reaches_late_is_no_longer_verified(tmp_path: Path) -> None:
    average = "torch.optim.swa_utils.AveragedModel(model, avg_fn=mean)"
    first = BEFORE.replace(
        "calls = [0]", "average = []\nmean = lambda a, p, n: a.lerp(p, max(1 - (1 + n) / (10 + n), 0.02))"
    )
    first = first[: first.index("    calls[0]")] + f"    average or average.append({average})\n"
    first += "    optimizer.step()\n    average[0].update_parameters(model)\n    return loss\n"
    result = compared(tmp_path, first.replace("0.02", "0.01"), first)
    assert result.verdict is Verdict.UNVERIFIED, result.headline
    assert "with counts as they are after" in result.headline
