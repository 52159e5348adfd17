"""Programs begin as the libraries they are made of would have them begin."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optexp.equivalence.observation import carried
from optexp.errors import NoReference
from optexp.program import Snapshot
from optexp.program.program import Alias
from optexp.user_code.aliasing import with_names
from optexp.workloads.module import Module


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "ASGD", "Rprop", "Adagrad"])
def test_state_that_is_made_early_begins_as_torch_makes_it(name: str) -> None:
    inputs = [{"shape": [8, 16]}]
    workload = Module(target="torch.nn:Tanh", inputs=inputs)
    workload = Module(target="tests.cheats.models:Linear", inputs=[{"shape": [8, 64]}], mode="train", optimizer=name)
    ours, fresh = (workload.build(torch.device("cpu"), torch.float32, 0) for _ in range(2))
    batch = workload.batch(torch.Generator().manual_seed(1))
    assert fresh.optimizer is not None
    groups = fresh.optimizer.param_groups
    fresh = replace(fresh, optimizer=type(fresh.optimizer)(fresh.model.parameters(), lr=groups[0]["lr"]))  # type: ignore[call-arg]
    for _ in range(3):
        ours.step(ours, batch)
        fresh.step(fresh, batch)
    for a, b in zip(ours.model.parameters(), fresh.model.parameters(), strict=True):
        assert torch.equal(a, b)


CACHED = """
import torch
from torch import nn


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 4)

    def forward(self, x):
        if not hasattr(self, "cosine"):
            self.register_buffer("cosine", torch.cos(x[:1].detach()))
        return self.line(x) * self.cosine
"""


def test_a_buffer_that_a_step_registers_in_another_model_has_its_own_name() -> None:
    """Unlike one that the other model has and the baseline lacks."""
    model = torch.nn.Linear(2, 2)
    model.register_buffer("extra", torch.ones(1))
    program = Module(target="torch.nn:Linear", args=[2, 2], inputs=[{"shape": [2, 2]}]).build(
        torch.device("cpu"), torch.float32, 0
    )
    other = with_names(replace(program, model=model), {"weight": Alias("weight"), "bias": Alias("bias")})
    model.register_buffer("cosine", torch.ones(1))
    assert other.state().keys() == {"param/weight", "param/bias", "buffer/cosine"}


def test_a_buffer_that_a_step_registers_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cached.v2.py").write_text(CACHED)  # a file's name may have dots
    workload = Module(target="cached.v2.py:Cached", inputs=[{"shape": [2, 4]}])
    program = workload.build(torch.device("cpu"), torch.float32, 0)
    start = Snapshot(program)
    program.step(program, workload.batch(torch.Generator().manual_seed(1)))
    registered = program.model.cosine.clone()
    program.put(start.values)
    assert torch.equal(program.model.cosine, registered)
    later = {name: tensor.clone() for name, tensor in program.state().items()}
    assert carried(later, start.values).keys() == {"buffer/cosine"}
    start.restore(program)
    assert not hasattr(program.model, "cosine")
    program.register(later)
    assert torch.equal(program.model.cosine, registered)
    program.model.register_parameter("late", torch.nn.Parameter(torch.ones(1)))
    with pytest.raises(NoReference, match="a step registers late in the model, which no optimizer holds"):
        program.put(start.values)
