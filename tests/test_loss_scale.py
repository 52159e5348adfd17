"""A loss scale is settled before anything is checked, and steps that it leaves out are counted."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from optexp.equivalence.autocast import autocast
from optexp.measurement.clock import Timing
from optexp.measurement.samples import Pair, Sample
from optexp.measurement.watchdogs import skipped_steps
from optexp.program import Program
from optexp.strategies.amp import Amp
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy, contract
from optexp.trace import Trace
from optexp.verification.trial import Plan
from optexp.verification.verify import verify
from optexp.workers.arm import Arm
from optexp.workers.arm_timing import steps_of_scale
from optexp.workers.client import InProcess
from optexp.workers.reference import Reference
from optexp.workers.spec import Spec
from optexp.workloads.mlp import Mlp

CPU = torch.device("cpu")


class Steep(Mlp):
    """Gradients overflow float16 until the scale has fallen eight times."""

    factor = 4e3

    def loss(self, output, batch):
        return nn.functional.mse_loss(output, batch[-1]) * self.factor


class OwnScale(Strategy):
    """Steps begin with this scale."""

    stage = Stage.OPTIMIZER
    name = "own_scale"

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def apply(self, program: Program) -> tuple[Program, Notes]:
        scaler = torch.amp.GradScaler("cpu", init_scale=self.scale)
        scaler.scale(torch.zeros(()))
        return replace(program, scaler=scaler), {}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "")


def steep(mode: str, lr: float = 1e-9) -> Steep:
    return Steep(mode=mode, dim=16, layers=2, batch_size=8, optim="sgd", lr=lr)


def arm(mode: str = "train") -> Arm:
    made, workload = Arm(), steep(mode)
    made.setup(Spec(workload, (), "cpu", "float32", seed=0, autocast="float16").pack())
    return made


def test_the_scale_has_settled_when_an_arm_is_ready() -> None:
    program = arm().program
    assert program.scaler is not None
    settled = program.scaler.get_scale()
    assert settled < 2**14
    for _ in range(4):
        program.run()
    assert program.scaler.get_scale() == settled


@pytest.mark.parametrize("factor", [1e-3, 1e3, 1.4e3, 2e3, 2.8e3, 4e3])
def test_without_an_optimizer_it_leaves_room_for_other_batches(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Steep, "factor", factor)
    program = arm("forward_backward").program
    scaler = program.scaler
    assert scaler is not None
    assert scaler.get_scale() <= 2**16
    scaler.update(scaler.get_scale() * 3.9)
    program.run()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in program.model.parameters())


@pytest.mark.parametrize("mode", ["forward_backward", "train"])
@pytest.mark.parametrize(("scale", "right"), [(8.0, True), (2.0**-30, False)])
def test_a_scale_of_its_own_is_right_where_no_gradient_is_lost(mode: str, scale: float, right: bool) -> None:
    stack = [Amp("float16"), OwnScale(scale)]
    promise = contract(stack)
    bare = Spec(steep(mode, lr=1e-5), (), "cpu", "float32", seed=0, contract=promise)
    reference, yardstick, candidate = InProcess(Reference(), "r"), InProcess(Arm(), "b"), InProcess(Arm(), "c")
    reference.call(Reference.setup, packed=bare.pack())
    yardstick.call(Arm.setup, packed=replace(bare, autocast="float16").pack())
    candidate.call(Arm.setup, packed=replace(bare, strategies=tuple(stack)).pack())
    found = verify(reference, yardstick, candidate, Plan([1]), promise)
    assert found.ok is right, found.headline


def test_every_block_starts_from_the_settled_scale() -> None:
    made = arm()
    program = made.program
    assert program.scaler is not None
    settled = program.scaler.get_scale()
    program.state()["scaler/scale"].fill_(2.0**20)
    assert not made.block(steps=4, lead_in=1).skipped
    assert program.scaler.get_scale() == settled


def test_a_block_with_a_skipped_step_says_so() -> None:
    made = arm()
    made.initial.values["scaler/scale"].fill_(2.0**20)
    assert made.block(steps=4, lead_in=0).skipped


def test_clean_steps_are_counted_across_growth() -> None:
    program = autocast(Mlp(mode="train", dim=4).build(CPU, torch.float32, 0), "float16")
    assert program.scaler is not None
    first = steps_of_scale(program)
    assert first is not None
    state = program.state()
    state["scaler/scale"].mul_(2)
    state["scaler/growth_tracker"].fill_(3)
    assert steps_of_scale(program) == first + program.scaler.get_growth_interval() + 3
    assert steps_of_scale(Mlp(mode="train", dim=4).build(CPU, torch.float32, 0)) is None


def test_such_pairs_do_not_count() -> None:
    fair, unfair = Timing(1, 1.0, None), Timing(1, 0.5, None, skipped=True)
    found = Sample([Pair(fair, fair, True)] * 19 + [Pair(fair, unfair, True)])
    assert found.log_ratio == 0.0
    assert len(found.kept) == 19
    watch = skipped_steps([found])
    assert not watch.ok
    assert not watch.refuses
    assert "1 of 20 pairs" in watch.text
