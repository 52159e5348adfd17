"""A script's model inside its step: calls of it are the program's, all else is its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from optexp.errors import NoReference
from optexp.program import Outputs, Program, ResidentFeed, preserved
from optexp.user_code.handed_model import Model
from optexp.user_code.handed_optimizer import Optimizer
from optexp.user_code.own_program import INSIDE
from optexp.user_code.script_run import run
from optexp.user_code.script_step import Body, Inference
from optexp.workloads.script import Script


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(2, 1), 0

    def forward(self, x: Tensor) -> Any:
        return self.layer(x)

    def loss(self, x: Tensor) -> Any:
        self.calls += 1
        return self(x).sum()


def test_calls_from_methods_of_the_class_are_the_programs() -> None:
    net = Net()
    feed = ResidentFeed(torch.device("cpu"))
    program = Program(net, lambda program, batch: {}, feed, forward=lambda x: net(x) + 100)
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.1)
    model: Any = Model(program, optimizer)
    model._optexp.keeps = True
    x = torch.zeros(1, 2)
    assert torch.equal(model.loss(x), net(x).sum() + 100)
    assert torch.equal(model._optexp.returned, net(x) + 100)
    assert net.calls == 1  # `self.calls += 1` reached the model
    assert model.layer is net.layer
    assert isinstance(model, Net)
    model.layer = nn.Identity()
    assert isinstance(net.layer, nn.Identity)


COLLECTS = """\
import optexp
import torch
net, found = torch.nn.Linear(2, 1), []
for (x,) in optexp.steps([(torch.ones(3, 2),)], model=net):
    moved = x.to("cpu")
    found.append(net(moved))
"""


def test_what_an_inference_loop_collects_is_a_result(tmp_path: Path) -> None:
    path = tmp_path / "infer.py"
    path.write_text(COLLECTS)
    reached = run(path, [])
    net = reached.mark.model
    program = Program(net, lambda program, batch: {}, ResidentFeed(torch.device("cpu")), forward=lambda x: net(x) + 100)
    none: Any = None
    x = torch.zeros(3, 2)
    results = Body(reached)(Model(program, Optimizer(none, ())), [(x,)], None)
    assert set(results) == {"moved", "model"}
    assert torch.equal(results["model"], net(x) + 100)


def test_a_loop_without_an_optimizer_may_clear_gradients(tmp_path: Path) -> None:
    """As for gradients of inputs, or an update by hand."""
    path = tmp_path / "by_hand.py"
    by_hand = (
        "    net.zero_grad()\n    net(x).sum().backward()\n    net.weight.data.add_(net.weight.grad, alpha=-0.5)\n"
    )
    path.write_text(COLLECTS.replace("    moved", by_hand + "    moved", 1))
    reached = run(path, [])
    net = reached.mark.model
    step, before = Inference(Body(reached), lambda batch: [tuple(batch)]), net.weight.detach().clone()
    program = Program(net, step, ResidentFeed(torch.device("cpu")))
    for _ in range(2):
        step(program, (torch.ones(3, 2),))
    assert torch.allclose(net.weight, before - 2 * 0.5 * 3)


def test_an_inference_loop_that_ends_itself_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "infer.py"
    path.write_text(COLLECTS.replace("    moved", "    if len(found) == 2:\n        break\n    moved"))
    reached = run(path, [])
    step = Inference(Body(reached), lambda batch: [tuple(batch)])
    program = Program(reached.mark.model, step, ResidentFeed(torch.device("cpu")))
    batch = (torch.zeros(3, 2),)
    for _ in range(2):
        assert step(program, batch)
    with pytest.raises(NoReference, match="not in this one, as after"):
        step(program, batch)


WRAPPED = """\
import optexp
import torch
net = torch.nn.Linear(2, 2)
outer = torch.nn.Sequential(net, torch.nn.ReLU())
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for x in optexp.steps([torch.rand(3, 2)], model=net, optimizer=optimizer):
    loss = (outer(x) * torch.rand(3, 2)).square().sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.parametrize("model", ["net", "outer"])
@pytest.mark.parametrize("mode", ["train", "forward"])
def test_a_model_that_another_module_calls_is_out_of_reach(model: str, mode: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    text = WRAPPED if mode == "train" else WRAPPED.replace(", optimizer=optimizer", "")
    path.write_text(text.replace("model=net", f"model={model}"))
    workload = Script(path=str(path))
    workload.mode = mode
    workload.build(torch.device("cpu"), torch.float32, 0)
    assert (INSIDE in workload.notes()) is (model == "net")


SAMPLES = """\
import optexp
import torch
net, x = torch.nn.Linear(2, 2), torch.ones(3, 2)
with torch.no_grad():
    for t in optexp.steps([torch.ones(1)], model=net):
        x = x + t * net(x)
"""


def test_what_an_inference_loop_carries_is_put_back(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text(SAMPLES)
    workload = Script(path=str(path))
    workload.mode = "forward"
    program = workload.build(torch.device("cpu"), torch.float32, 0)
    batch = workload.batch(torch.Generator().manual_seed(0))
    found = list[Outputs]()
    for _ in range(2):
        with preserved(program):
            found.append(program.step(program, batch))
    assert torch.equal(found[0]["output"], found[1]["output"])
    program.step(program, batch)
    assert not torch.equal(program.step(program, batch)["output"], found[0]["output"])


def test_batches_that_were_made_in_inference_mode_can_be_written_to(tmp_path: Path) -> None:
    path = tmp_path / "infer.py"
    lines = COLLECTS.splitlines()
    path.write_text("\n".join([*lines[:3], "with torch.inference_mode():", *(f"    {line}" for line in lines[3:])]))
    workload = Script(path=str(path))
    program = workload.build(torch.device("cpu"), torch.float32, 0)
    (batch,) = workload.batches(torch.Generator().manual_seed(0), 1)
    assert isinstance(batch, dict)
    assert [tensor.is_inference() for tensor in batch.values()] == [False]
    program.feed.reset([batch])
    expected = program.run()["output.model"].clone()
    for tensor in batch.values():
        tensor.mul_(2)
    assert not torch.equal(program.run()["output.model"], expected)
