"""What a user's training step remembers beside tensors is put back, so that every step can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optexp.lookup import import_file
from optexp.program import Program, ResidentFeed, Snapshot, prime
from optexp.usermodel.memory import Memory
from optexp.usermodel.trainstep import TrainStep

HEAD = """
import torch
from torch import nn

Model = lambda: nn.Linear(4, 2)
get_inputs = lambda: [torch.randn(8, 4), torch.randint(2, (8,))]

def get_optimizer(params):
    global schedule
    optimizer = torch.optim.AdamW(params, lr=0.1)
    schedule = torch.optim.lr_scheduler.%s
    return optimizer
"""
PLAIN = """
def train_step(model, batch, optimizer):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    %s
    return loss
"""
FILES = {
    "a schedule": HEAD % "StepLR(optimizer, 2, 0.5)" + PLAIN % "schedule.step()",
    "a schedule of momentum too": HEAD % "OneCycleLR(optimizer, 0.1, 1000)" + PLAIN % "schedule.step()",
    "a schedule by loss": HEAD % "ReduceLROnPlateau(optimizer, 'max', patience=0)" + PLAIN % "schedule.step(loss)",
    "a loss scale": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=1)

        def train_step(model, batch, optimizer):
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            return loss, scaler.get_scale()
    """),
    "an averaged model": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        torch.manual_seed(0)
        average = torch.optim.swa_utils.AveragedModel(Model())

        def train_step(model, batch, optimizer):
            loss = nn.functional.cross_entropy(model(batch[0]) + average(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            average.update_parameters(model)
            return loss
    """),
    "a counter": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        count, total = 0, torch.zeros(())

        def counted():
            global count
            count += 1
            return count

        def train_step(model, batch, optimizer):
            global total
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) * counted()
            loss.backward()
            optimizer.step()
            total += loss.detach()
            return loss, total.clone()
    """),
}


def program(step: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> Program:
    feed = ResidentFeed(torch.device("cpu"))
    feed.reset([tuple(inputs)])
    made = Program(model, TrainStep(step, lambda batch: batch), feed, optimizer=optimizer, targets=1)
    made = replace(made, memory=Memory(step, model, optimizer))
    prime(made)
    return made


def four_steps(made: Program) -> list[Tensor]:
    return [tensor.clone() for _ in range(4) for tensor in made.run().values()]


@pytest.mark.parametrize("kind", FILES)
def test_is_put_back(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "port.py"
    path.write_text(FILES[kind])
    file = import_file(path, "workload.path")
    torch.manual_seed(1)
    model = file.Model()
    made = program(file.train_step, model, file.get_optimizer(list(model.parameters())), file.get_inputs())
    start = Snapshot(made)
    first = four_steps(made)
    without = Snapshot(replace(made, memory=None))
    without.values = start.values
    without.restore(made)
    assert not all(map(torch.equal, four_steps(made), first)), "the tensors alone would do"
    for _ in range(2):
        start.restore(made)
        assert all(map(torch.equal, four_steps(made), first))


def test_what_a_function_around_the_step_holds_is_put_back() -> None:
    def made() -> Callable[..., Tensor]:
        count = 0

        def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
            nonlocal count
            count += 1
            loss: Tensor = model(batch[0]).square().mean() * count
            loss.backward()
            optimizer.step()
            return loss

        return step

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    trained = program(made(), model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(8, 4), torch.zeros(8)])
    start = Snapshot(trained)
    first = four_steps(trained)
    start.restore(trained)
    assert all(map(torch.equal, four_steps(trained), first))


def test_a_module_that_never_changes_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = nn.Linear(4, 2)

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        loss: Tensor = (model(batch[0]) - teacher(batch[0])).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    trained = program(step, model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(8, 4), torch.zeros(8)])
    assert trained.memory is not None
    start = Snapshot(trained)
    trained.run()
    assert trained.memory.read()["teacher"] is start.elsewhere["teacher"]
    assert trained.memory.news() == {}
    monkeypatch.setattr(teacher, "load_state_dict", pytest.fail)
    start.restore(trained)
    monkeypatch.undo()
    kept = teacher.weight.detach().clone()
    teacher.weight.data.mul_(2)  # which no counter of versions sees
    assert trained.memory.news().keys() == {"teacher"}
    start.restore(trained)
    assert torch.equal(teacher.weight, kept)


def test_what_cannot_be_pickled_is_left_alone() -> None:
    class Odd:
        def state_dict(self) -> Any:
            return (number for number in (1,))

        def load_state_dict(self, state: Any) -> None:
            raise AssertionError

    odd = Odd()

    def step(model: Any, batch: Any, optimizer: Any) -> Tensor:
        loss: Tensor = model(batch[0]).square().mean() * len([odd])
        loss.backward()
        optimizer.step()
        return loss

    model = nn.Linear(4, 2)
    trained = program(step, model, torch.optim.SGD(model.parameters(), lr=0.1), [torch.randn(8, 4), torch.zeros(8)])
    Snapshot(trained).restore(trained)


def test_a_rate_on_the_device_stays_there() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    memory = Memory(lambda: None, model, optimizer)
    saved = memory.read()
    rate = torch.tensor(0.2)
    optimizer.param_groups[0].update(lr=rate, betas=(0.5, 0.5))
    memory.write(saved)
    assert optimizer.param_groups[0]["lr"] is rate
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)
