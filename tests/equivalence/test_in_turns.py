"""Where batches are large, only the arm that takes a step holds one, and fp64 one result at a time."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from optexp.equivalence import checksums, drawn_set, mutants, tensor_math
from optexp.equivalence.input_families import ONE_BY_ONE
from optexp.equivalence.missed import End
from optexp.program import Batch, Program
from optexp.records.verification import Verification
from optexp.schema import choice
from optexp.strategy import REASSOCIATES, Counters, Evidence, Notes, Stage, Strategy
from optexp.support.memory_plan import LEAST, PLANS, WIDE, Sizes
from optexp.trace import Trace
from optexp.verification.first_step import check_first_step
from optexp.verification.replay import Replay
from optexp.verification.trial import Plan
from optexp.verification.verify import verify
from optexp.workers.arm import Arm
from optexp.workers.client import InProcess
from optexp.workers.reference import Reference
from optexp.workers.spec import Spec
from optexp.workload import Workload

BYTES = 2**22
MOST = 10.5  # times the bytes of a batch: all processes of a verification together


class Scaled(nn.Module):
    """One intermediate and one result, each as large as the input."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(x)


@dataclass
class Large(Workload):
    mode: str = choice("forward")

    @property
    def samples(self) -> int:
        return 64

    def model(self) -> nn.Module:
        return Scaled()

    def batch(self, generator: torch.Generator) -> Batch:
        return (torch.randn(64, BYTES // 4 // 64, generator=generator),)


class Wrong(Scaled):
    """One element in the last row is off."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y[-1, -1] += 1e-3
        return y


class Writes(Scaled):
    """Its input."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x[-1, -1] = 0.0
        return y


@dataclass
class Becomes(Strategy):
    stage = Stage.MODEL
    make: Callable[[], nn.Module] = Scaled

    def apply(self, program: Program) -> tuple[Program, Notes]:
        return replace(program, model=self.make()), {}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "replaced")


@pytest.fixture(autouse=True)
def small_counts_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (checksums, drawn_set):
        monkeypatch.setattr(module, "LARGE", BYTES // 16)
    monkeypatch.setattr(mutants, "FIRST", BYTES // 64)
    monkeypatch.setattr(tensor_math, "CACHED", 2**12)


Peers = tuple[InProcess[Reference], InProcess[Arm], InProcess[Arm]]


def peers(make: Callable[[], nn.Module], plan: int, workload: Workload | None = None) -> Peers:
    found = InProcess(Reference(), "reference"), InProcess(Arm(), "yardstick"), InProcess(Arm(), "candidate")
    for peer, stack in zip(found, ((), (), (Becomes(make),)), strict=True):
        peer.target.hold(Spec(workload or Large(), stack, "cpu", "float32", 0, contract=REASSOCIATES, plan=plan))
    return found


def verified(make: Callable[[], nn.Module], plan: int, workload: Workload | None = None) -> Verification:
    return verify(*peers(make, plan, workload), Plan(range(2), in_turns=plan > 0), REASSOCIATES)


class SharedFactor(nn.Module):
    """All results share a factor, whose exponent is a sum that the plain order happens to take exactly."""

    def __init__(self) -> None:
        super().__init__()
        terms = 4 * torch.randn(4096, generator=torch.Generator().manual_seed(3))
        self.register_buffer("terms", terms)

    def total(self) -> Tensor:
        return self.terms.sum()

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.exp(self.total() + 204.0)


class InLanes(SharedFactor):
    """As a compiled loop adds up: six times the error of the plain order, half of that of others."""

    def total(self) -> Tensor:
        lanes = torch.zeros(16, dtype=self.terms.dtype)
        for row in self.terms.view(-1, 16).flip(0):
            lanes = lanes + row
        return lanes.sum()


class LessExact(SharedFactor):
    def total(self) -> Tensor:
        return super().total() + 2e-3


@dataclass
class Sharing(Large):
    def model(self) -> nn.Module:
        return SharedFactor()


@pytest.mark.parametrize("plan", [0, LEAST])
def test_one_run_of_a_factor_that_all_results_share_is_no_measure(plan: int) -> None:
    found = verified(InLanes, plan, Sharing())
    assert found.ok, found.headline
    assert not verified(LessExact, plan, Sharing()).ok


def test_a_timed_step_is_judged_by_other_orders_too() -> None:
    reference, yardstick, candidate = peers(InLanes, LEAST, Sharing())
    findings = Replay(reference, yardstick, End(5), in_turns=True).judged(candidate)
    assert all(finding.ok for finding in findings)
    candidate.target.hold(
        Spec(Sharing(), (Becomes(LessExact),), "cpu", "float32", 0, contract=REASSOCIATES, plan=LEAST)
    )
    assert not all(finding.ok for finding in Replay(reference, yardstick, End(5), in_turns=True).judged(candidate))


def most_held(check: Callable[[], object], folder: Path) -> float:
    """Batches' worth of memory that is allocated at once, beyond what is held at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        check()
    recorded.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    memory = sorted((e for e in events if e["name"] == "[memory]"), key=lambda event: event["ts"])
    return max(accumulate(event["args"]["Bytes"] for event in memory)) / BYTES


@pytest.mark.parametrize("plan", [0, pytest.param(1, marks=pytest.mark.slow), LEAST])
@pytest.mark.parametrize("make", [Scaled, Wrong, Writes])
def test_the_verdict_is_the_same_however_little_is_held(make: Callable[[], nn.Module], plan: int) -> None:
    found = verified(make, plan)
    assert found.ok == (make is Scaled), found.headline
    if make is Scaled:
        assert found.mutants
        assert all(row.caught for row in found.mutants.values())


@pytest.mark.parametrize("plan", [0, 1])
def test_exchanged_inputs_come_at_the_same_address_again(plan: int) -> None:
    """What remembers results by addresses shows there, although the arm rested meanwhile."""
    arm = Arm()
    arm.setup(Spec(Large(), (), "cpu", "float32", 0, plan=plan).pack())
    places = set()
    for seed in range(3):
        batch = Large().batch(torch.Generator().manual_seed(seed))
        arm.inbox.contents = batch
        arm.load(0 if arm.in_turns else seed, ONE_BY_ONE)
        brought = arm.bring(seed)
        assert torch.equal(brought[0], batch[0])
        places.add(brought[0].data_ptr())
        if arm.in_turns:
            arm.rest()
    assert len(places) == 1


@pytest.mark.slow
def test_a_verification_holds_few_batches_at_a_time(tmp_path: Path) -> None:
    def check() -> None:
        assert verified(Scaled, LEAST).ok

    assert most_held(check, tmp_path) <= MOST


class Alone(InProcess[Arm]):
    """Before each of its calls: how many batches the other arms hold."""

    def __init__(self, target: Arm, others: list[Arm]) -> None:
        super().__init__(target, "arm")
        self.others, self.beside = others, 0

    def start(self, *args: Any, **kwargs: Any) -> Any:
        self.beside = max([self.beside, *(len(other.batches) for other in self.others)])
        return super().start(*args, **kwargs)


def look_again(reference: InProcess[Reference], yardstick: InProcess[Arm], candidate: InProcess[Arm]) -> None:
    """The checks that repeat steps, the first step among them as one that no repetition explains."""
    left = candidate.target.repeated(End(1))
    for arm in (yardstick, candidate):
        arm.target.firstly = {name: (mean + 1.0, rms) for name, (mean, rms) in left.items()}
        arm.target.rest()
    assert check_first_step(yardstick, candidate, in_turns=True)[0] == []
    for renewed in (False, True):
        judged = Replay(reference, yardstick, End(5), in_turns=True, renewed=renewed).judged(candidate)
        assert all(finding.ok for finding in judged)


def test_one_arm_alone_holds_batches_while_steps_are_repeated() -> None:
    reference, yardstick, candidate = peers(Scaled, LEAST)
    ours, theirs = Alone(candidate.target, [yardstick.target]), Alone(yardstick.target, [candidate.target])
    look_again(reference, theirs, ours)
    assert (ours.beside, theirs.beside) == (0, 0)
    assert not yardstick.target.batches + candidate.target.batches


@pytest.mark.slow
@pytest.mark.parametrize("plan", [1, LEAST])
def test_repeated_steps_hold_what_the_plan_counts_on(plan: int, tmp_path: Path) -> None:
    parties = peers(Scaled, plan)
    counted = Sizes(BYTES, BYTES).verified_in_turns(PLANS[plan].batches) / BYTES
    assert (
        most_held(lambda: look_again(*parties), tmp_path) <= counted + WIDE + 0.1
    )  # an intermediate in float64, and small tensors
