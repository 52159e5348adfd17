"""Scripts without any module: the tensors that they train are the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.errors import ConfigError
from optexp.program import NotCalled, Program, preserved
from optexp.workloads.script import Script

WITH_OPTIMIZER = """\
import torch
import optexp
torch.manual_seed(0)
w, more = torch.rand(2, 1, requires_grad=True), [torch.zeros(1, requires_grad=True), torch.ones(1, requires_grad=True)]
optimizer = torch.optim.Adam([w, *more], lr=0.1)
for x in optexp.steps([torch.rand(4, 2), torch.rand(4, 2)]):
    loss = (x @ w * more[1] + more[0]).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""
BY_HAND = """\
import torch
import optexp
torch.manual_seed(0)
def net(x, w, b):
    return x @ w + b
def sgd(params, lr):
    with torch.no_grad():
        for p in params:
            p -= lr * p.grad
            p.grad.zero_()
w, b = torch.rand(2, 1, requires_grad=True), torch.zeros(1, requires_grad=True)
for x in optexp.steps([torch.rand(4, 2), torch.rand(4, 2)]):
    loss = net(x, w, b).square().mean()
    loss.backward()
    sgd([w, b], 0.1)
"""
STACKED = """\
import copy
import torch
import optexp
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
torch.manual_seed(0)
params, _ = stack_module_state([nn.Linear(2, 1) for _ in range(3)])
skeleton = copy.deepcopy(nn.Linear(2, 1)).to("meta")
def call(params, x):
    return functional_call(skeleton, params, (x,))
optimizer = torch.optim.Adam(params.values(), lr=0.1)
for x in optexp.steps([torch.rand(4, 2), torch.rand(4, 2)]):
    loss = vmap(call, (0, None))(params, x).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


def built(folder: Path, text: str, dtype: torch.dtype = torch.float32) -> tuple[Script, Program]:
    path = folder / "train.py"
    path.write_text(text)
    workload = Script(path=str(path))
    workload.mode = "train"
    return workload, workload.build(torch.device("cpu"), dtype, 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("text", "names"), [(WITH_OPTIMIZER, ["w", "more_0", "more_1"]), (BY_HAND, ["b", "w"])])
def test_tensors_that_a_script_trains_are_its_model(
    text: str, names: list[str], dtype: torch.dtype, tmp_path: Path
) -> None:
    workload, program = built(tmp_path, text, dtype)
    assert [name for name, _ in program.model.named_parameters()] == names
    assert any(f"({', '.join(names)}) are the model" in note for note in workload.notes())
    assert isinstance(program.optimizer, NotCalled) is (text is BY_HAND)
    batch = workload.in_dtype(workload.batch(torch.Generator().manual_seed(0)), dtype)
    before, found = program.model.get_parameter("w").detach().clone(), list[torch.Tensor]()
    for _ in range(2):
        with preserved(program):
            assert program.step(program, batch)["loss"].dtype is dtype
            found.append(program.model.get_parameter("w").detach().clone())
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], before)
    assert torch.equal(program.model.get_parameter("w"), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_module_without_values_is_no_model(dtype: torch.dtype, tmp_path: Path) -> None:
    workload, program = built(tmp_path, STACKED, dtype)
    program.step(program, workload.in_dtype(workload.batch(torch.Generator().manual_seed(0)), dtype))
    assert {name: p.grad is not None for name, p in program.model.named_parameters()} == {
        "params_0": True,
        "params_1": True,
    }


def test_a_step_that_trains_nothing_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="names no optimizer, and its step calls none"):
        built(tmp_path, BY_HAND.replace("    sgd([w, b], 0.1)\n", ""))
    with pytest.raises(ConfigError, match="names no model, and no variable holds one"):
        built(tmp_path, BY_HAND.replace(", requires_grad=True", ""))
