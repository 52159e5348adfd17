"""A loss scale is settled before anything is checked, and steps that it leaves out are counted."""

from __future__ import annotations

import torch
from torch import nn

from optexp.arm import Arm, Spec, steps_of_scale
from optexp.equivalence.autocast import autocast
from optexp.measurement.clock import Timing
from optexp.measurement.sampling import Pair, Sample
from optexp.measurement.watchdogs import skipped_steps
from optexp.workloads.mlp import Mlp

CPU = torch.device("cpu")


class Steep(Mlp):
    """Gradients overflow float16 until the scale has fallen eight times."""

    def loss(self, output, batch):
        return nn.functional.mse_loss(output, batch[-1]) * 4e3


def arm() -> Arm:
    made = Arm()
    workload = Steep(mode="train", dim=16, layers=2, batch_size=8, optim="sgd", lr=1e-9)
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
    assert not watch.fatal
    assert "1 of 20 pairs" in watch.text
