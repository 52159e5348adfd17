"""Gradients that a step leaves for the next one: those that are read are state, whichever way others are cleared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra import compose, initialize_config_dir

from optexp.comparison import runner
from optexp.config import search_path
from optexp.errors import NoReference
from optexp.program import Program, preserved
from optexp.result import Verdict
from optexp.workloads.script import Script
from tests.test_scripts import SETTINGS

CPU = torch.device("cpu")
SCRIPT = """\
import copy
import optexp
import torch
from torch import nn
torch.manual_seed(0)
net, other = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)), nn.Linear(4, 1)
optimizer, second = torch.optim.SGD(net.parameters(), lr=0.1), torch.optim.SGD(other.parameters(), lr=0.1)
data = [(torch.randn(8, 4), torch.randn(8, 1)) for _ in range(8)]
count = 0
%s
for x, y in optexp.steps(data, model=net, optimizer=optimizer):
    %s
    loss = (net(x) - y).square().mean()
    loss.backward()
    optimizer.step()
    %s
    count += 1
"""
EACH = "for p in net.parameters(): p.grad"
HAD = "for p in net.parameters(): p.grad = torch.ones_like(p)"
ADDS = {
    "never": ("", "", ""),
    "every second time by hand": ("", f"if count % 2 == 0:\n        {EACH} = None", ""),
    "every fourth time, after the step": ("", "", "if count % 4 == 3: optimizer.zero_grad()"),
    "every fourth time, else cleared after": ("", "", f"if count % 4 != 3:\n        {EACH} = None"),
    "every fourth time, else cleared before": ("", f"if count % 4 != 3:\n        {EACH} = None", ""),
    "as momentum": ("", f"if count > 0:\n        {EACH}.mul_(0.9)", ""),
    "as momentum from the start": (HAD, f"{EACH}.mul_(0.9)", ""),
    "of another network": ("", "optimizer.zero_grad()", "other(x).mean().backward(); second.step()"),
}
CLEARS = {
    "before": ("", "optimizer.zero_grad()", ""),
    "after": ("", "", "optimizer.zero_grad()"),
    "to zeros, decay by hand": (
        "",
        f"optimizer.zero_grad(set_to_none=False)\n    if count > 0:\n        {EACH}.add_(p.detach(), alpha=0.1)",
        "",
    ),
    "by hand": ("", f"{EACH} = None", ""),
    "in place": (HAD, f"{EACH}.zero_()", ""),
    "in place, decay by hand": (HAD, f"{EACH}.zero_()\n    {EACH}.add_(p.detach(), alpha=0.1)", ""),
    "of the layers": ("", "for layer in net: layer.zero_grad()", "assert net and len(net) == 2 and net[1] in net"),
    "of two networks": ("", "optimizer.zero_grad(); second.zero_grad()", "other(x).mean().backward(); second.step()"),
    "of a frozen part that nobody reads": ("", "optimizer.zero_grad()", "other(x).mean().backward()"),
}


def built(folder: Path, parts: tuple[str, str, str]) -> tuple[Program, Callable[[int], float]]:
    """A script's program, and a function that steps on the numbered batch of its data and returns the loss."""
    path = folder / "train.py"
    path.write_text(SCRIPT % parts)
    workload = Script(path=str(path))
    workload.mode = "train"
    program = workload.build(CPU, torch.float32, 0)
    data = workload.reached.mark.source
    return program, lambda index: program.step(program, workload.form.pack([data[index]]))["loss"].item()


@pytest.mark.parametrize("parts", [*ADDS.values(), *CLEARS.values()], ids=[*ADDS, *CLEARS])
def test_steps_leave_what_the_script_leaves(parts: tuple[str, str, str], tmp_path: Path) -> None:
    """Whether gradients are cleared or not; and again from the first state."""
    program, step = built(tmp_path, parts)
    plain: dict[str, Any] = {}
    exec((SCRIPT % parts).replace("optexp.steps(data, model=net, optimizer=optimizer)", "data"), plain)
    for _ in range(2):
        with preserved(program):
            assert [step(index) for index in range(8)][-1] == plain["loss"].item()


def test_gradients_that_are_cleared_every_second_time_are_named(tmp_path: Path) -> None:
    _, step = built(tmp_path, ("", "if count % 2 == 0: optimizer.zero_grad()", ""))
    step(0)
    with pytest.raises(NoReference, match="adds to gradients of the step before"):
        step(1)


def test_only_gradients_that_are_read_are_state(tmp_path: Path) -> None:
    for ways, state in ((ADDS, True), (CLEARS, False)):
        for parts in ways.values():
            program, _ = built(tmp_path, parts)
            assert program.step_state is not None
            assert ("gradients" in program.step_state.first) is state


AFTERWARDS = {
    "of another network's loss": "other(x)[:, :0].sum().add(net(x).mean()).backward(); second.step()",
    "of another network's loss, every fifth time": "if count % 5 == 4: net(x).mean().backward(); second.step()",
    "by hand": "net(x).mean().backward()",
}


@pytest.mark.parametrize("later", AFTERWARDS.values(), ids=AFTERWARDS)
def test_gradients_are_those_that_the_optimizer_took(later: str, tmp_path: Path) -> None:
    """A generator's loss adds to the gradients of the discriminator, whose optimizer has stepped."""
    program, step = built(tmp_path, ("", "optimizer.zero_grad()", later))
    for index in range(6):
        before = [parameter.detach().clone() for parameter in program.model.parameters()]
        step(index)
        for then, parameter in zip(before, program.model.parameters(), strict=True):
            assert parameter.grad is not None
            torch.testing.assert_close(parameter.detach(), then - 0.1 * parameter.grad)


STEP = """
import torch
from torch import nn
def Model(): return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
def get_inputs(): return [torch.randn(16, 8), torch.randn(16, 1)]
def get_optimizer(params): return torch.optim.SGD(params, lr=0.1)
def train_step(model, batch, optimizer):
    loss = (model(batch[0]) - batch[1]).square().mean()
    loss.backward()
    optimizer.step()
    %s
    return loss
"""


@pytest.mark.slow
def test_a_second_file_that_clears_what_the_first_one_adds_to_is_another_program(tmp_path: Path) -> None:
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    before.write_text(STEP % "")
    for text, verdict in ((STEP % "", Verdict.VERIFIED), (STEP % "optimizer.zero_grad()", Verdict.NOT_EQUIVALENT)):
        after.write_text(text)
        given = ["workload=module", f"workload.path={before}", "workload.mode=train", "strategy=replace"]
        search_path.register()
        with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
            config = compose("config", overrides=[*SETTINGS, *given, f"strategy.replace.target={after}"])
        result = runner.run(config, tmp_path / verdict)
        assert result.verdict is verdict, result.headline
