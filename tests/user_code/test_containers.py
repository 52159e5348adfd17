"""Scripts whose model and optimizer lie in containers, and optimizers that evaluate the model themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from optexp.errors import NoReference
from optexp.program import Program
from optexp.workloads.script import Script

HEAD = """\
import optexp
import torch
from torch import nn
g, d = nn.Linear(4, 1), nn.Linear(1, 1)
def sgd(net): return torch.optim.SGD(net.parameters(), lr=0.1)
data = [(torch.ones(8, 4), torch.ones(8, 1))]
"""
HELD = {
    "dict": ('nets, steps = {"g": g, "d": d}, {"g": sgd(g)}', 'nets["g"]', 'steps["g"]'),
    "list": ("nets, steps = [d, g], [sgd(d), sgd(g)]", "nets[1]", "steps[1]"),
    "tuple": ("held = (g, sgd(g))", "held[0]", "held[1]"),
    "nested": ('held = {"g": {"net": g, "steps": [sgd(g)]}}', 'held["g"]["net"]', 'held["g"]["steps"][0]'),
}
LOOP = """
for x, y in optexp.steps(data, model={0}, optimizer={1}):
    {1}.zero_grad()
    loss = ({0}(x) - y).square().mean()
    loss.backward()
    {1}.step()
"""
CLOSURE = """
optimizer = torch.optim.LBFGS(g.parameters())
for x, y in optexp.steps(data, model=g, optimizer=optimizer):
    def closure():
        optimizer.zero_grad()
        loss = (g(x) - y).square().mean()
        loss.backward()
        return loss
    optimizer.step(closure)
"""
TWICE = """
class Sharp(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})
    def first_step(self):
        self.zero_grad()
    def second_step(self):
        for p in self.param_groups[0]["params"]: p.data.sub_(p.grad, alpha=0.1)
    def step(self, closure=None):
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()
optimizer = Sharp(g.parameters())
for x, y in optexp.steps(data, model=g, optimizer=optimizer):
    g(x).mean().backward()
    optimizer.first_step()
    g(x).mean().backward()
    optimizer.second_step()
"""
HIDDEN = """
optimizers = iter([sgd(g)] * 9)
for x, y in optexp.steps(data, model=g, optimizer=next(optimizers)):
    for p in g.parameters(): p.grad = None
    loss = g(x).mean()
    loss.backward()
    next(optimizers).step()
"""


def built(folder: Path, text: str) -> tuple[Program, Script]:
    path = folder / "train.py"
    path.write_text(HEAD + text)
    workload = Script(path=str(path))
    workload.mode = "train"
    return workload.build(torch.device("cpu"), torch.float32, 0), workload


@pytest.mark.parametrize("names", HELD.values(), ids=HELD)
def test_the_model_is_found_in_what_holds_it(names: tuple[str, str, str], tmp_path: Path) -> None:
    program, workload = built(tmp_path, names[0] + LOOP.format(*names[1:]))
    calls = list[torch.Tensor]()

    def call(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        made: torch.Tensor = program.model(x)
        return made

    object.__setattr__(program, "forward", call)
    program.step(program, workload.batch(torch.Generator().manual_seed(0)))
    assert len(calls) == 1
    assert isinstance(workload.reached.mark.model, nn.Linear)


@pytest.mark.parametrize(("text", "name"), [(CLOSURE, "LBFGS"), (TWICE, "Sharp")])
def test_an_optimizer_that_evaluates_the_model_itself_is_named(text: str, name: str, tmp_path: Path) -> None:
    with pytest.raises(NoReference, match=rf"^{name}.step\(\) evaluates the model itself, by a closure"):
        built(tmp_path, text)


def test_an_optimizer_without_a_step_is_named(tmp_path: Path) -> None:
    written = TWICE[TWICE.index("        self.first_step()\n") : TWICE.index("optimizer = Sharp")]
    with pytest.raises(NoReference, match=r"^Sharp.step\(\) is not implemented"):
        built(tmp_path, TWICE.replace(written, "        raise NotImplementedError\n"))


def test_an_optimizer_that_no_variable_holds_is_said_to_be_out_of_sight(tmp_path: Path) -> None:
    with pytest.raises(NoReference, match="no variable that the marked body names holds the marked optimizer"):
        built(tmp_path, HIDDEN)
