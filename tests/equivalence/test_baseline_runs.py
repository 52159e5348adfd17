"""Runs of the baseline: which yardsticks each kind adds to, and which run is no measure."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from optexp.equivalence.judge import Judge
from optexp.equivalence.noise import RUNS
from optexp.equivalence.observation import Observation, observed
from optexp.equivalence.trajectory import RATES
from optexp.equivalence.yardsticks import SetYardsticks
from optexp.errors import NoReference
from optexp.strategy import REASSOCIATES, Contract
from tests.equivalence.conftest import CPU


@pytest.fixture
def judge(net: type) -> Judge:
    found = Judge(net(mode="forward"), CPU, torch.float32, 7, REASSOCIATES)
    found.draw(0, 2)
    return found


def run(judge: Judge, net: type, step: int = 0, **options) -> Observation:
    """A fresh run of the baseline, after the judge has taken it in."""
    program = net(mode="forward").build(CPU, torch.float32, 7)
    seen = observed(program, judge.batches[step], **options)
    judge.yardstick(step, seen)
    return seen


def sources(yardsticks: SetYardsticks) -> list[bool]:
    return ["out/output" in found for found in (yardsticks.current.plain, yardsticks.noise, yardsticks.reassociated)]


def test_each_kind_of_run_has_its_yardstick(judge: Judge, net: type) -> None:
    found = judge.inputs.yardsticks
    run(judge, net)
    assert sources(found) == [True, False, False]
    run(judge, net, noise=1)
    assert sources(found) == [True, True, False]
    run(judge, net, order=1)
    assert sources(found) == [True, True, True]
    assert found.spread["out/output"] > 0


class Preconditioned(torch.optim.SGD):
    """Its update holds a factorization, of whose error one run says little."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            slope = parameter.grad.flatten(1) if parameter.dim() > 1 else parameter.grad[:, None]
            values, vectors = torch.linalg.eigh(slope @ slope.mT + 1e-2 * torch.eye(len(slope), dtype=slope.dtype))
            update = (vectors * values**-0.5) @ vectors.mT @ slope
            parameter.sub_(update.view_as(parameter), alpha=self.param_groups[0]["lr"])


@pytest.mark.parametrize(("kind", "measured"), [(Preconditioned, True), (torch.optim.SGD, False)])
def test_updates_of_a_users_optimizer_have_reassociated_runs(
    net: type, monkeypatch: pytest.MonkeyPatch, kind: type[torch.optim.SGD], measured: bool
) -> None:
    monkeypatch.setattr(net, "optimizer", lambda self, model: kind(model.parameters(), lr=0.1))
    workload = net(mode="train")
    judge = Judge(workload, CPU, torch.float32, 7, REASSOCIATES)
    judge.draw(0, 2)
    program = workload.build(CPU, torch.float32, 7)
    judge.yardstick(0, observed(program, judge.batches[0]))
    program, rates = workload.build(CPU, torch.float32, 7), RATES[1]
    program.optimizer.param_groups[0]["lr"] *= rates
    judge.yardstick(1, observed(program, judge.batches[1], order=1))
    limits = judge.inputs.yardsticks.reassociated
    assert ("change/0.weight" in limits) is measured
    assert not measured or 0 < limits["change/0.weight"].rms < 1e-5, "of the step's own rate"


def test_noisy_runs_of_another_step_leave_the_current_one(judge: Judge, net: type) -> None:
    seen = run(judge, net)
    run(judge, net, step=1, noise=1)
    assert (judge.inputs.step, judge.inputs.baseline.keys()) == (0, seen.keys())
    assert not judge.inputs.yardsticks.spread


def test_noisy_runs_beyond_the_usual_ones_widen_no_limit(judge: Judge, net: type) -> None:
    run(judge, net)
    for seed in range(RUNS):
        run(judge, net, noise=seed + 1)
    limits = dict(judge.inputs.yardsticks.noise)
    run(judge, net, noise=RUNS + 1)
    assert judge.inputs.yardsticks.noise == limits
    assert judge.inputs.yardsticks.noisy_runs == RUNS + 1


def test_a_run_without_an_operator_to_reorder_adds_nothing(judge: Judge, net: type) -> None:
    seen = run(judge, net)
    judge.yardstick(0, seen | {"flag/reassociated": torch.tensor(0), "out/output": seen["out/output"] + 1})
    assert not judge.inputs.yardsticks.reassociated
    assert judge.inputs.baseline["out/output"].equal(seen["out/output"])


def test_integers_that_differ_between_runs_are_remembered(judge: Judge, net: type) -> None:
    seen, traits = run(judge, net), judge.inputs.traits
    for value, found in ((1, set()), (1, set()), (2, {"out/count"})):
        with pytest.raises(NoReference, match="float64 gives nothing to compare out/count with"):
            judge.yardstick(0, seen | {"out/count": torch.tensor(value)})
        assert traits.unrepeated_integers == found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"flag/random": torch.tensor(1)}, "draws random numbers even with every dropout at p = 0"),
        ({"out/output": torch.full((8, 10), torch.nan)}, "80 of 80 elements of the baseline's own output are NaN"),
        ({"out/output": torch.full((8, 10), torch.inf)}, "own output overflow where fp64 has numbers, so that"),
        (
            {"out/output": torch.cat([torch.full((4, 10), torch.nan), torch.full((4, 10), torch.inf)])},
            r"own output are NaN \(40\) and overflow \(40\) where fp64 has numbers",
        ),
        ({"out/other": torch.zeros(3)}, "float64 gives nothing to compare out/other with"),
    ],
)
def test_a_run_that_is_no_measure_leaves_equivalence_undecided(
    judge: Judge, net: type, change: Observation, message: str
) -> None:
    seen = run(judge, net)
    with pytest.raises(NoReference, match=message):
        judge.yardstick(0, seen | change)


@pytest.mark.parametrize("contract", [REASSOCIATES, Contract("PRECISION", "bfloat16")])
def test_a_program_that_gives_nan_in_float64_too_is_no_measure_at_any_precision(contract: Contract, net: type) -> None:
    workload = net(mode="forward", make=lambda: nn.Sequential(nn.Flatten(), nn.Linear(192, 4), Log()))
    judge = Judge(workload, CPU, torch.float32, 7, contract)
    judge.draw(0, 1)
    seen = observed(workload.build(CPU, torch.float32, 7), judge.batches[0])
    with pytest.raises(
        NoReference, match=r"32 of 32 elements of .* are NaN, so .*, and in float64, too: mend the program"
    ):
        judge.yardstick(0, seen)


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (-x.square()).log()
