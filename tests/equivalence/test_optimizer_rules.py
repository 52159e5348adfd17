"""Hyperparameters: what is off by less than parameters are rounded is refused, and what is only rounded is not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from optexp.equivalence.optimizer_rules import unlike_rules
from optexp.equivalence.rule import CALLED, RULE, Rule
from optexp.program import Program
from optexp.workloads.module import Module


def having(**changed: Any) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        for group in program.optimizer.param_groups:
            group.update(changed)
        return program

    return change


@pytest.mark.parametrize(
    "changed", [{"lr": 1e-3 * 1.0001}, {"weight_decay": 0.0101}, {"betas": (0.9, 0.99901)}, {"eps": 1.1e-8}]
)
def test_a_hyperparameter_that_is_off_by_little_is_refused_by_name(check, net, changed):
    verification = check(net(mode="train"), having(**changed), seeds=1)
    assert not verification.ok
    key = next(iter(changed))
    assert f"{RULE}/{key}" in {failure.tensor for failure in verification.failures}
    assert f"{key} of " in verification.headline


@pytest.mark.parametrize(
    "changed",
    [{"foreach": True}, {"fused": True}, {"lr": torch.tensor(1e-3)}, {"betas": (torch.tensor(0.9).item(), 0.999)}],
)
def test_another_implementation_of_the_same_numbers_passes(check, net, changed):
    verification = check(net(mode="train"), having(**changed), seeds=1)
    assert verification.ok, verification.headline


class AnotherAdam(torch.optim.AdamW):
    """A class of another name with the same numbers."""


def made(net: type, kind: type[torch.optim.Optimizer], **numbers: Any) -> Mapping[str, Tensor]:
    program = net(mode="train").build(torch.device("cpu"), torch.float32, 7)
    optimizer = kind(program.model.parameters(), **numbers)
    object.__setattr__(program, "optimizer", optimizer)
    return {RULE: Rule.of(program).packed()}


def test_numbers_of_two_classes(net):
    plain = made(net, torch.optim.AdamW, lr=1e-3)
    assert not [*unlike_rules(made(net, AnotherAdam, lr=1e-3), plain)]
    assert not [*unlike_rules(made(net, AnotherAdam, lr=torch.tensor(1e-3)), plain)]
    assert not [*unlike_rules(made(net, torch.optim.SGD, lr=0.1), plain)]  # where nothing agrees, the gates judge
    (unseen,) = unlike_rules(made(net, AnotherAdam, lr=1.0001e-3), plain)
    assert unseen.ok
    assert "two classes, AnotherAdam and AdamW" in unseen.unseen


def test_numbers_without_a_meaning_are_not_compared(net):
    one, other = made(net, torch.optim.Adam, lr=1e-3), made(net, torch.optim.AdamW, lr=1e-3, weight_decay=0.0)
    assert not [*unlike_rules(one, other)]
    still = made(net, torch.optim.SGD, lr=0.1, dampening=0.5)
    assert not [*unlike_rules(still, made(net, torch.optim.SGD, lr=0.1))]
    moving = made(net, torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5)
    expected = made(net, torch.optim.SGD, lr=0.1, momentum=0.9)
    assert [finding.tensor for finding in unlike_rules(moving, expected)] == [f"{RULE}/dampening"]


def test_hyperparameters_of_calls_are_compared_where_both_arms_tell_them(net):
    """A compiled step and a replayed one tell none: rates that both leave are compared then."""
    early, late = (made(net, torch.optim.SGD, lr=rate)[RULE] for rate in (0.1, 0.05))
    noted, silent = {RULE: late, CALLED: early}, {RULE: late}
    assert not [*unlike_rules(silent, noted)]
    assert not [*unlike_rules(noted, silent)]
    assert not [*unlike_rules({RULE: early, CALLED: early}, noted)], "the next step's rate, set after this one"
    assert [finding.tensor for finding in unlike_rules({RULE: late, CALLED: late}, noted)] == [f"{RULE}/lr"]


def test_a_rate_that_a_schedule_multiplied_in_float32_is_the_same(net):
    rate, narrow = 1e-3, torch.tensor(1e-3)
    for _ in range(40):
        rate, narrow = rate * 0.97, narrow * 0.97
    tensors = made(net, torch.optim.AdamW, lr=narrow)
    assert not [*unlike_rules(tensors, made(net, torch.optim.AdamW, lr=rate))]
    off = made(net, torch.optim.AdamW, lr=narrow * 1.0001)
    assert [finding.tensor for finding in unlike_rules(off, made(net, torch.optim.AdamW, lr=rate))] == [f"{RULE}/lr"]


SECOND = """
import torch
from torch import nn
Model = lambda: nn.Linear(4, 2)
get_inputs = lambda: [torch.randn(8, 4), torch.randint(2, (8,))]
other = nn.Linear(2, 1)
beside = torch.optim.Adam(other.parameters(), lr=0.001)

def get_optimizer(params):
    global schedule
    optimizer = torch.optim.SGD(params, lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 100, gamma=0.1)
    return optimizer

def train_step(model, batch, optimizer):
    optimizer.zero_grad()
    beside.zero_grad()
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) + other(model(batch[0])).mean()
    loss.backward()
    optimizer.step()
    beside.step()
    schedule.step()
    return loss
"""


def test_numbers_of_other_optimizers_and_of_schedules_are_compared(tmp_path: Path) -> None:
    def seen(text: str) -> Mapping[str, Tensor]:
        path = tmp_path / "port.py"
        path.write_text(text)
        return {
            RULE: Rule.of(Module(path=str(path), mode="train").build(torch.device("cpu"), torch.float32, 7)).packed()
        }

    plain = seen(SECOND)
    assert not [*unlike_rules(seen(SECOND), plain)]
    for old, new, name in (("0.001", "0.00100001", "beside/lr"), ("gamma=0.1", "gamma=0.1001", "schedule/gamma")):
        assert [finding.tensor for finding in unlike_rules(seen(SECOND.replace(old, new)), plain)] == [f"{RULE}/{name}"]
    halved = SECOND.replace(
        "StepLR(optimizer, 100, gamma=0.1)", "LambdaLR(optimizer, lambda step: 0.5 ** (step > 640))"
    )
    (late,) = unlike_rules(seen(halved.replace("640", "672")), seen(halved))
    assert late.message == "rates of later steps of schedule is 0.1, the baseline's 0.05"


def test_a_rule_travels_whole(net: type) -> None:
    """Numbers beyond 64 bits, NaN, flags, texts and NumPy's numbers are told as they are, or as texts."""
    numbers = {"seed": 2**70, "rate": float("nan"), "nesterov": True, "kind": "plain", "share": numpy.float64(0.5)}
    program = having(**numbers)(net(mode="train").build(torch.device("cpu"), torch.float32, 7))
    rule = Rule.unpacked({RULE: Rule.of(program).packed()})
    assert rule is not None
    told = {key: held[0].value for key, held in rule.groups[0].numbers.items()}
    assert (told["seed"], told["nesterov"], told["kind"], told["share"]) == (str(2**70), True, "plain", 0.5)
    assert told["rate"] != told["rate"]
