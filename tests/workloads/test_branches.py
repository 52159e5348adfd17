"""Towers: independent of each other, summed or returned one by one."""

import pytest
import torch

from optexp.program import Program, gradients
from optexp.workloads.branches import Branches


def build(workload: Branches) -> Program:
    program = workload.build(torch.device("cpu"), torch.float64, seed=0)
    program.feed.reset([tuple(t.double() for t in workload.batch(torch.Generator().manual_seed(1)))])
    return program


def test_the_sum_is_that_of_the_towers_outputs():
    summed = build(Branches(towers=3, dim=8, layers=2, batch_size=4)).run()
    apart = build(Branches(towers=3, dim=8, layers=2, batch_size=4, combine="none")).run()
    assert list(apart) == ["output.0", "output.1", "output.2"]
    torch.testing.assert_close(summed["output"], apart["output.0"] + apart["output.1"] + apart["output.2"])
    assert not torch.allclose(apart["output.0"], apart["output.1"])


@pytest.mark.parametrize("combine", ["sum", "none"])
def test_every_tower_gets_a_gradient(combine: str):
    program = build(Branches(mode="forward_backward", towers=2, dim=4, layers=1, batch_size=3, combine=combine))
    loss = program.run()["loss"].item()
    x, target = program.feed.batches[0]  # type: ignore[attr-defined]
    outputs = [tower(x) for tower in program.model.towers]
    errors = [sum(outputs) - target] if combine == "sum" else [output - target for output in outputs]
    assert loss == pytest.approx(sum(error.square().mean().item() for error in errors))
    assert set(gradients(program)) == {f"grad/towers.{i}.0.{name}" for i in (0, 1) for name in ("weight", "bias")}


def test_outputs_apart_can_be_trained():
    program = build(Branches(mode="train", towers=2, dim=4, layers=1, batch_size=8, combine="none", lr=1e-2))
    losses = [program.run()["loss"].item() for _ in range(10)]
    assert losses[-1] < losses[0]
