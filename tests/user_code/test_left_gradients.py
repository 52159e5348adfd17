"""Gradients that a step leaves for the next one: those that are read are named, and ways to clear them are told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optexp.errors import NoReference
from optexp.workloads.script import Script

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
    "every second time": ("", "if count % 2 == 0: optimizer.zero_grad()", ""),
    "every second time by hand": ("", f"if count % 2 == 0:\n        {EACH} = None", ""),
    "every fourth time, after the step": ("", "", "if count % 4 == 3: optimizer.zero_grad()"),
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


def built(folder: Path, parts: tuple[str, str, str]) -> Callable[[int], float]:
    """A function that makes a step with the numbered batch of the script's data, and returns its loss."""
    path = folder / "train.py"
    path.write_text(SCRIPT % parts)
    workload = Script(path=str(path))
    workload.mode = "train"
    program = workload.build(CPU, torch.float32, 0)
    data = workload.reached.mark.source
    return lambda index: program.step(program, workload.form.pack([data[index]]))["loss"].item()


@pytest.mark.parametrize("parts", ADDS.values(), ids=ADDS)
def test_gradients_that_a_step_adds_to_are_named(parts: tuple[str, str, str], tmp_path: Path) -> None:
    with pytest.raises(NoReference, match="adds to gradients that earlier steps left"):
        [*map(built(tmp_path, parts), range(2))]


@pytest.mark.parametrize("parts", CLEARS.values(), ids=CLEARS)
def test_a_step_that_clears_its_gradients_runs_as_the_script_does(parts: tuple[str, str, str], tmp_path: Path) -> None:
    step = built(tmp_path, parts)
    plain: dict[str, Any] = {}
    exec((SCRIPT % parts).replace("optexp.steps(data, model=net, optimizer=optimizer)", "data"), plain)
    assert [step(index) for index in range(8)][-1] == plain["loss"].item()
