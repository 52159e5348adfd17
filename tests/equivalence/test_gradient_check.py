"""Gradients beside the loss of the same draw: another mask in backward shows, and no honest step does."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from optexp.equivalence import randomness
from optexp.equivalence.autocast import autocast
from optexp.equivalence.gradient_check import DRAWS, mismatch, slopes
from optexp.program import Snapshot

CPU = torch.device("cpu")
UNIT = 2.0**-24
MODES = ["forward_backward", "train"]


class Redrawn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, p):
        ctx.p = p
        return F.dropout(x, p)

    @staticmethod
    def backward(ctx, slope):
        return F.dropout(slope, ctx.p), None


class Dropping(nn.Module):
    def __init__(self, activation, drop=F.dropout, around=lambda block, x: block(x)):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 6, 3), activation(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(54, 32))
        self.activation, self.second = activation(), nn.Linear(32, 10)
        self.drop, self.around = drop, around

    def block(self, x):
        return self.second(self.activation(self.drop(x, 0.2)))

    def forward(self, x):
        return self.around(self.block, self.first(x))


def found(net, mode="forward_backward", seed=0, activation=nn.ReLU, change=lambda program: program, **parts):
    workload = net(mode=mode, batch_size=16, make=lambda: Dropping(activation, **parts))
    program = change(workload.build(CPU, torch.float32, seed))
    return slopes(program, workload.batch(torch.Generator().manual_seed(1)), Snapshot(program))


def share(candidate, baseline):
    off, limit = mismatch(candidate, baseline)
    return off / limit


WRONG = {
    "redrawn": {"drop": Redrawn.apply},
    "checkpoint": {"around": partial(checkpoint, use_reentrant=False, preserve_rng_state=False)},
    "none in backward": {"drop": lambda x, p: x + (F.dropout(x, p) - x).detach()},
}
HONEST = {
    "by hand": {"drop": lambda x, p: x * (torch.rand_like(x) >= p) / (1 - p)},
    "in place": {"drop": lambda x, p: F.dropout(x.clone(), p, inplace=True)},
    "checkpoint": {"around": partial(checkpoint, use_reentrant=False)},
}
PRECISIONS = {"float32": lambda program: program} | {
    dtype: partial(autocast, dtype=dtype) for dtype in ("bfloat16", "float16")
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("wrong", WRONG)
def test_another_mask_in_backward_shows(net, mode, precision, wrong):
    told = partial(found, net, mode, activation=nn.GELU, change=PRECISIONS[precision])
    assert share(told(**WRONG[wrong]), told()) > 1.5


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("honest", HONEST)
@pytest.mark.parametrize("activation", [nn.ReLU, nn.GELU])
def test_honest_steps_raise_no_alarm(net, mode, precision, honest, activation):
    for seed in range(2):
        told = partial(found, net, mode, seed, activation, PRECISIONS[precision])
        assert share(told(**HONEST[honest]), told()) < 0.7, seed


def test_gradients_that_the_step_itself_scales_are_no_mistake(net):
    """Clipped, say: then they are not those of the loss in the baseline either."""

    def clipped(step, program, batch):
        outputs = step(program, batch)
        nn.utils.clip_grad_norm_(program.model.parameters(), 0.1)
        return outputs

    told = partial(found, net, activation=nn.GELU, change=lambda p: replace(p, step=partial(clipped, p.step)))
    assert share(told(**HONEST["by hand"]), told()) < 0.7


def test_nothing_is_told_without_a_loss_or_where_draws_do_not_repeat(net):
    def loses(step, program, batch):
        return {"output": step(program, batch)["loss"]}

    baseline = found(net)
    assert len(baseline) == DRAWS
    assert found(net, change=lambda program: replace(program, step=partial(loses, program.step))) == []
    assert found(net, "forward") == []
    assert mismatch([], baseline)[1] == mismatch(baseline, [])[1] == float("inf")
    generator = torch.Generator()
    workload = net(mode="forward_backward", make=lambda: Dropping(nn.GELU, drop=own_generator(generator)))
    program = workload.build(CPU, torch.float32, 0)
    thrown = randomness.throw(program, workload.batch(torch.Generator().manual_seed(1)), Snapshot(program), UNIT)
    assert not thrown.repeat
    assert thrown.slopes == []


def own_generator(generator):
    return lambda x, p: x * (torch.rand(x.shape, generator=generator) >= p) / (1 - p)


@pytest.mark.parametrize("mode", MODES)
def test_a_mask_that_distributions_do_not_tell_fails_by_its_slopes(net, mode):
    def thrown(**parts):
        workload = net(mode=mode, batch_size=16, make=lambda: Dropping(nn.GELU, **parts))
        program = workload.build(CPU, torch.float32, 0)
        start = Snapshot(program)
        told = randomness.throw(program, workload.batch(torch.Generator().manual_seed(1)), start, UNIT)
        start.restore(program)
        assert all(torch.equal(tensor, start.values[name]) for name, tensor in program.state().items())
        return told

    baseline = thrown()
    (finding, *_), facts = randomness.compare(thrown(**WRONG["redrawn"]), baseline, UNIT)
    assert finding.message.startswith("gradients are not those of the loss: dropout draws another mask in backward")
    assert facts.slopes_off > facts.slopes_limit
    assert randomness.compare(thrown(**HONEST["by hand"]), baseline, UNIT)[0] == []
