"""What a user's training step remembers beside tensors is put back, so that every step can be repeated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optexp.program import Program, ResidentFeed, Snapshot, preserved, prime
from optexp.user_code.importing import import_file
from optexp.user_code.step_modules import move
from optexp.user_code.step_state import TrackedStepState
from optexp.user_code.train_step import TrainStep

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
            total = total + loss.detach()
            return loss, total.clone()
    """),
    "nothing at first": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        mean = None

        def train_step(model, batch, optimizer):
            global mean, late
            if mean is None:
                late = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            mean = loss.detach() if mean is None else (mean + loss.detach()) / 2
            (loss * (1 + mean)).backward()
            optimizer.step()
            late.step()
            return loss
    """),
    "optimizers that the first call makes": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        other, held = None, {}

        def train_step(model, batch, optimizer):
            global other
            if other is None:
                other = torch.optim.SGD([model.bias], lr=0.1, momentum=0.9)
                held["sparse"] = [torch.optim.Adam([model.weight], lr=0.1)]
                held["late"] = torch.optim.lr_scheduler.ExponentialLR(other, 0.5)
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            optimizer.step()
            other.step()
            held["sparse"][0].step()
            held["late"].step()
            return loss, model.weight.detach().clone(), model.bias.detach().clone()
    """),
    "objects around model and optimizer that the first call makes": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        class Lookahead:
            def __init__(self, model, optimizer):
                self.model, self.optimizer, self.count = model, optimizer, 0
                self.slow = [p.detach().clone() for p in model.parameters()]

            def step(self):
                self.optimizer.step()
                self.count += 1
                if self.count % 2 == 0:
                    for kept, p in zip(self.slow, self.model.parameters()):
                        kept.lerp_(p.detach(), 0.5)
                        p.data.copy_(kept)

        around = None

        def train_step(model, batch, optimizer):
            global around
            if around is None:
                around = Lookahead(model, optimizer)
            loss = nn.functional.cross_entropy(around.model(batch[0]), batch[1])
            loss.backward()
            around.step()
            return loss
    """),
    "a dict, a namespace and a list": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        from types import SimpleNamespace
        state, args, queue = {"step": 0}, SimpleNamespace(seen=0), [torch.zeros(2), torch.zeros(2)]

        def train_step(model, batch, optimizer):
            state["step"] += 1
            args.seen += len(batch[0])
            out = model(batch[0])
            queue[state["step"] % 2].copy_(out.detach().mean(0))
            loss = nn.functional.cross_entropy(out + queue[0], batch[1]) * state["step"] / args.seen
            loss.backward()
            optimizer.step()
            return loss
    """),
    "another network and its optimizer": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        torch.manual_seed(0)
        judge = nn.Linear(2, 1)
        others = [torch.optim.Adam(judge.parameters(), lr=0.1)]

        def train_step(model, batch, optimizer):
            made = model(batch[0])
            others[0].zero_grad()
            judge(made.detach()).square().mean().backward()
            others[0].step()
            loss = nn.functional.softplus(-judge(made)).mean()
            loss.backward()
            optimizer.step()
            return loss
    """),
    "a method of a trainer": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        class Trainer:
            def __init__(self):
                self.count, self.hidden = 0, None

            def counted(self):
                self.count += 1
                return self.count

            def step(self, model, batch, optimizer):
                self.hidden = (torch.zeros(2) if self.hidden is None else self.hidden) / 2 + 1
                loss = nn.functional.cross_entropy(model(batch[0]) + self.hidden, batch[1]) * self.counted()
                loss.backward()
                optimizer.step()
                return loss

        train_step = Trainer().step
    """),
    "a partial, decorated": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        from functools import partial
        count = 0

        @torch.enable_grad()
        def weighted(model, batch, optimizer, weight):
            global count
            count += 1
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) * weight * count
            loss.backward()
            optimizer.step()
            return loss

        train_step = partial(weighted, weight=2.0)
    """),
    "random numbers, arrays, classes and defaults": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        import random
        import numpy
        generator, draws, seen = numpy.random.default_rng(0), numpy.zeros(1), set()

        class Config:
            step = 0

        def train_step(model, batch, optimizer, counts={"calls": 0}):
            Config.step += 1
            counts["calls"] += 1
            draws[0] += generator.random() + random.random() + numpy.random.rand()
            seen.add(Config.step)
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) * draws[0] * len(seen) * counts["calls"]
            loss.backward()
            optimizer.step()
            return loss
    """),
    "a buffer that two hold": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        from collections import deque
        from dataclasses import dataclass

        @dataclass
        class Kept:
            loss: torch.Tensor

        class Agent:
            def __init__(self, buffer):
                self.buffer, self.log = buffer, []

        buffer = deque(maxlen=3)
        agent = Agent(buffer)

        def train_step(model, batch, optimizer):
            buffer.append(batch[0].mean() + len(buffer))
            loss = nn.functional.cross_entropy(model(batch[0]), batch[1]) * agent.buffer[0].abs()
            agent.log.append(Kept(loss))
            loss.backward()
            optimizer.step()
            return loss * len(agent.buffer)
    """),
    "a bank that grows": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        class Bank(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("keys", torch.zeros(0, 2))

        bank = Bank()

        def train_step(model, batch, optimizer):
            out = model(batch[0])
            loss = nn.functional.cross_entropy(out, batch[1]) * (1 + len(bank.keys))
            loss.backward()
            optimizer.step()
            bank.keys = torch.cat([bank.keys, out.detach()])
            return loss
    """),
    "the optimizer's state of another network": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        torch.manual_seed(0)
        head = nn.Linear(2, 2)

        def get_optimizer(params):
            return torch.optim.NAdam([*params, *head.parameters()], lr=0.1)

        def train_step(model, batch, optimizer):
            loss = nn.functional.cross_entropy(head(model(batch[0])), batch[1])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss
    """),
    "a schedule around another": HEAD % "ConstantLR(optimizer)"
    + dedent("""
        class WarmUp(torch.optim.lr_scheduler.LRScheduler):
            def __init__(self, optimizer, after):
                self.after = after
                super().__init__(optimizer)

            def get_lr(self):
                return [0.01 * self.last_epoch for _ in self.base_lrs]

            def step(self):
                super().step() if self.last_epoch < 2 else self.after.step()

        plain_optimizer = get_optimizer

        def get_optimizer(params):
            global schedule
            optimizer = plain_optimizer(params)
            schedule = WarmUp(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
            return optimizer
    """)
    + PLAIN % "schedule.step()",
}


def program(step: Callable[..., Any], model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Any) -> Program:
    feed = ResidentFeed(torch.device("cpu"))
    feed.reset([tuple(inputs)])
    made = Program(model, TrainStep(step, lambda batch: batch), feed, optimizer=optimizer, targets=1)
    made = replace(made, step_state=TrackedStepState(step, model, optimizer))
    prime(made)
    with preserved(made):  # a workload tries a step, too, when it builds its program
        made.run()
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
    without = Snapshot(replace(made, step_state=None))
    without.values = start.values
    without.restore(made)
    assert not all(map(torch.equal, four_steps(made), first)), "the tensors alone would do"
    for _ in range(2):
        start.restore(made)
        assert all(map(torch.equal, four_steps(made), first))


@pytest.mark.parametrize("kind", [kind for kind in FILES if "first" in kind])
def test_is_put_back_between_steps(kind: str, tmp_path: Path) -> None:
    """An optimizer is state, and still moves the model's parameters afterwards."""
    path = tmp_path / "port.py"
    path.write_text(FILES[kind])
    file = import_file(path, "workload.path")
    model = file.Model()
    made = program(file.train_step, model, file.get_optimizer(list(model.parameters())), file.get_inputs())
    four_steps(made)
    start = Snapshot(made)
    first = four_steps(made)
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


def test_what_never_changes_is_kept_once() -> None:
    teacher, table = nn.Linear(4, 2), torch.randn(100, 4)

    def step(model: Any, batch: Any, optimizer: Any) -> Any:
        return teacher(table[:8])

    model = nn.Linear(4, 2)
    state = TrackedStepState(step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, None, None)
    now = state.read()
    assert all(now[name] is state.first[name] for name in ("teacher", "table"))
    assert state.news(now) == {}
    teacher.weight.data.mul_(2)  # which no count of versions sees
    now = state.read()
    assert state.news(now).keys() == {"teacher"}
    state.write(state.first)
    assert state.news(state.read()) == {}
    assert torch.equal(now["teacher"]["weight"], teacher.weight * 2)


@pytest.mark.slow
def test_what_goes_to_another_process_arrives(tmp_path: Path) -> None:
    """As when the reference takes a step from where the baseline was."""
    for number, text in enumerate(FILES.values()):
        path = tmp_path / f"port{number}.py"
        path.write_text(text)
        arms = []
        for _ in range(2):
            file = import_file(path, "workload.path", anew=True)
            torch.manual_seed(1)
            model = file.Model()
            optimizer = file.get_optimizer(list(model.parameters()))
            torch.manual_seed(2)
            arms.append(program(file.train_step, model, optimizer, file.get_inputs()))
        ahead, behind = arms
        four_steps(ahead)
        assert ahead.step_state is not None
        assert behind.step_state is not None
        now = ahead.step_state.read()
        news = ahead.step_state.news(now)
        behind.step_state.write({**behind.step_state.first, **behind.step_state.unpack(news)})
        for name, tensor in behind.state().items():
            tensor.copy_(ahead.state()[name])
        there = behind.step_state.news(behind.step_state.read())
        assert there.keys() == news.keys()
        steps = four_steps(behind)
        ahead.step_state.write(now)  # the process' own random numbers are the same for both
        assert all(map(torch.equal, steps, four_steps(ahead))), text


def test_counts_are_alike_when_equal_and_numbers_nearly() -> None:
    model = nn.Linear(4, 2)
    state = TrackedStepState(lambda: None, model, torch.optim.SGD(model.parameters(), lr=0.1))
    pairs = [
        ({"n": 2}, {"n": 3}, {"n": 3}, True), ({"n": 2}, {"n": 3}, {"n": 4}, False), ({1}, {1, 2}, {1, 3}, False),
        (0.0, 1.0, 1.001, True), (0.0, 1.0, 1.5, False), (9.0, 10.0, 10.01, True), (9.0, 10.0, 9.001, False),
        ([1e9, 0.0], [1e9, 1.0], [1e9, 9.0], False), (None, 1.0, 1.01, True), (inf, 1.0, 1.01, True),
        ([torch.ones(3), "a"], [torch.zeros(3), "a"], [torch.zeros(3) + 0.01, "a"], True),
        ([torch.ones(3)], [torch.zeros(3)], [torch.zeros(2)], False), (1.0, nan, 0.0, False),
        (torch.tensor(1), torch.tensor(2), torch.tensor(3), False), (None, 1, None, False),
        ({}, {"a": 1, "b": [{"c": 2}]}, {"b": [{"c": 2}], "a": 1}, True),
    ]  # fmt: skip
    for before, theirs, ours, alike in pairs:
        packed = (state.pack((before, after)) for after in (ours, theirs))
        assert state.alike(*packed) is alike, (before, theirs, ours)


def test_a_captured_graph_finds_tensors_where_they_were() -> None:
    total, bank = torch.zeros(3), nn.BatchNorm1d(3)

    def step(model: Any, batch: Any, optimizer: Any) -> None:
        nonlocal total
        total = total + bank(batch[0]).sum()

    model = nn.Linear(4, 2)
    state = TrackedStepState(step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    first, places = total, [tensor.data_ptr() for tensor in bank.state_dict().values()]
    step(None, [torch.randn(4, 3)], None)
    assert total is not first
    state.write(state.first)
    assert total is first
    assert [tensor.data_ptr() for tensor in bank.state_dict().values()] == places
    assert bank.num_batches_tracked == 0


def test_a_step_that_lies_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "their_steps.py").write_text("count = 0\ndef counted(model):\n    global count\n    count += 1")
    path = tmp_path / "port.py"
    path.write_text("import their_steps\ndef train_step(model, batch, optimizer): their_steps.counted(model)")
    monkeypatch.syspath_prepend(str(tmp_path))
    model = nn.Linear(4, 2)
    step = import_file(path, "workload.path").train_step
    state = TrackedStepState(step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    step(model, None, None)
    assert state.news(state.read()).keys() == {"count"}


def test_what_is_no_users_is_left_alone() -> None:
    """Mocks, and what answers every question; modules around the model; the data."""
    from unittest.mock import MagicMock

    class Odd:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    model = nn.Linear(4, 2)
    mock, odd, wrapper = MagicMock(), Odd(), nn.DataParallel(model)
    data = torch.utils.data.TensorDataset(torch.ones(3))

    def step(*_: Any) -> Any:
        return mock, odd, wrapper, data, torch, nn

    state = TrackedStepState(step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(name.startswith("optimizer/") or name.endswith("random") for name in state.slots)
    assert state.lost == []


def test_what_cannot_be_copied_is_named() -> None:
    class Locked(torch.optim.lr_scheduler.ExponentialLR):
        def state_dict(self) -> Any:
            return {"lines": (line for line in "ab")}

    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = Locked(optimizer, 0.5)
    state = TrackedStepState(lambda *_: schedule.step(), model, optimizer)
    assert state.lost == ["schedule (TypeError)"]


def test_modules_and_numbers_go_where_the_model_is() -> None:
    teacher, half, weights = nn.Linear(4, 2), nn.Linear(4, 2).bfloat16(), torch.ones(2)

    def loss(outputs: Any, batch: Any) -> Any:
        return teacher, half, weights

    model, cpu = nn.Linear(4, 2), torch.device("cpu")
    kept = weights
    move(loss, model, cpu, torch.float32)
    assert (teacher.weight.dtype, half.weight.dtype, weights is kept) == (torch.float32, torch.bfloat16, True)
    move(loss, model, cpu, torch.float64)
    assert {teacher.weight.dtype, half.weight.dtype, weights.dtype} == {torch.float64}


def test_a_tensor_that_an_optimizer_holds_gets_wider_where_it_is() -> None:
    image, model = torch.zeros(3, requires_grad=True), nn.Linear(3, 1).double()

    def step(model: nn.Module, batch: Any, optimizer: torch.optim.Optimizer) -> Any:
        return model(image)

    before = image
    move(step, model, torch.device("cpu"), torch.float64)
    assert image is before
    assert image.dtype is torch.float64


def test_a_rate_on_the_device_stays_there() -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = TrackedStepState(lambda: None, model, optimizer)
    saved = state.first
    rate = torch.tensor(0.2)
    optimizer.param_groups[0].update(lr=rate, betas=(0.5, 0.5))
    state.write(saved)
    assert optimizer.param_groups[0]["lr"] is rate
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


class Lazily:
    """Makes its attributes when it is called."""

    def __call__(self, model: Any, batch: Any, optimizer: Any) -> None:
        if not hasattr(self, "calls"):
            self.calls, self.mask, self.own, self.code = 0, torch.ones(3), [*model.parameters()], torch.sum
        self.calls += 1


def lazily(model: Any, batch: Any, optimizer: Any) -> None:
    if not hasattr(lazily, "calls"):
        lazily.calls, lazily.mask = 0, torch.ones(3)  # type: ignore[attr-defined]
        lazily.own, lazily.code = [*model.parameters()], torch.sum  # type: ignore[attr-defined]
    lazily.calls += 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("step", [Lazily(), lazily])
def test_attributes_that_a_call_makes_are_state_from_then_on(step: Any) -> None:
    model = torch.nn.Linear(2, 2)
    state = TrackedStepState(step, model, torch.optim.SGD(model.parameters(), lr=0.1))
    begun = state.read()
    step(model, None, None)
    once = state.read()
    assert state.changed(begun, once) == {}  # a cache is made once, and kept
    step(model, None, None)
    model.weight.data.add_(1)
    (name,) = state.changed(once, state.read())
    assert name.endswith("calls")
    state.write(begun)
    assert not hasattr(step, "calls")
    assert state.lost == []
