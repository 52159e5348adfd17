"""What a step leaves in a buffer for the next one: each is judged from where its own arm stood."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from optexp.equivalence.judge import Judge
from optexp.equivalence.observation import Observation, observe, observed
from optexp.equivalence.trajectory import TIMED
from optexp.program import Batch, Program, Snapshot
from optexp.strategy import REASSOCIATES

CPU = torch.device("cpu")


class Stream(nn.Module):
    """A filter along rows, which begins with the last ones of the image before, and counts images."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, (3, 1))
        self.register_buffer("tail", torch.zeros(8, 3, 2, 8))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x):
        padded = torch.cat([self.begun(x), x], 2)
        self.left(x)
        return self.filtered(padded).flatten(1)

    def begun(self, x):
        return self.tail

    def left(self, x):
        self.tail.copy_(x[:, :, -2:])
        self.count += 1

    def filtered(self, x):
        return self.conv(x)


class Replaced(Stream):
    """Puts another tensor in the buffer's place."""

    def left(self, x):
        self.tail = x[:, :, -2:].clone()
        self.count = self.count + 1


class InThree(Stream):
    def filtered(self, x):
        rows = x.shape[2] - 2
        taps = [torch.einsum("ncrw,oc->norw", x[:, :, i : i + rows], self.conv.weight[:, :, i, 0]) for i in range(3)]
        return sum(taps) + self.conv.bias[:, None, None]


class Padded(Stream):
    def begun(self, x):
        return torch.zeros_like(self.tail)


class Captured(Stream):
    """Reads where the buffer was at first, as a graph does whose model puts another in its place."""

    def __init__(self) -> None:
        super().__init__()
        self.then = [torch.zeros(8, 3, 2, 8)]

    def begun(self, x):
        return self.then[0]


class Frozen(Stream):
    """Right, but for what it leaves from the second image on."""

    def left(self, x):
        if not self.count:
            self.tail.copy_(x[:, :, -2:])
        self.count += 1


class CountsOnce(Stream):
    def left(self, x):
        super().left(x)
        self.count.fill_(1)


def by(model: type[Stream]) -> Callable[[Program], Program]:
    def change(program: Program) -> Program:
        program.model.__class__ = model
        program.model.then = [torch.zeros(8, 3, 2, 8)]
        return program

    return change


@pytest.mark.parametrize("mode", ["forward", "forward_backward"])
@pytest.mark.parametrize("model", [Stream, Replaced, InThree])
@pytest.mark.parametrize("baseline", [Stream, Replaced])
def test_honest_candidates_pass(check, net, mode, baseline, model):
    found = check(net(mode=mode, make=baseline), by(model), steps=3)
    assert found.ok, found.headline
    assert found.repeats


RESULT = {"forward": "output", "forward_backward": "loss"}
TAIL, COUNT = dict.fromkeys(RESULT, "buffer/tail"), dict.fromkeys(RESULT, "buffer/count")


@pytest.mark.parametrize("mode", RESULT)
@pytest.mark.parametrize(
    ("model", "tensor"), [(Padded, RESULT), (Captured, RESULT), (Frozen, TAIL), (CountsOnce, COUNT)]
)
def test_what_is_right_at_the_first_step_alone_is_caught_at_a_later_one(check, net, mode, model, tensor):
    workload = net(mode=mode, make=Stream)
    assert check(workload, by(model), steps=1).ok, "nothing shows in one step"
    found = check(workload, by(model), steps=3)
    assert tensor[mode] in {message.tensor for message in found.failures}, found.headline
    assert all(message.step > 0 for message in found.failures)


class Averaged(nn.BatchNorm2d):
    """Keeps a part of the last batch's mean, and forgets the others'."""

    def forward(self, x):
        self.running_mean.zero_()
        return super().forward(x)


def forgetful(program: Program) -> Program:
    program.model[1].__class__ = Averaged
    return program


def test_running_statistics_are_followed(check, net):
    workload = net(mode="forward_backward")
    assert check(workload, steps=3).ok
    assert check(workload, forgetful, steps=1).ok
    assert "buffer/1.running_mean" in {message.tensor for message in check(workload, forgetful, steps=3).failures}


def wobbling(program: Program) -> Program:
    """Rounds otherwise every time."""
    generator, conv = torch.Generator().manual_seed(0), program.model[0]
    conv.forward = lambda x: F.conv2d(x, conv.weight * (1 + 1e-6 * torch.rand((), generator=generator)), conv.bias)
    return program


def test_a_baseline_that_does_not_repeat_itself_counts_from_the_start_beside_itself(check, net):
    """It is no alarm of its own that it has counted one step more."""
    found = check(net(mode="forward_backward"), forgetful, baseline=wobbling, steps=3)
    assert not found.repeats
    assert "buffer/1.running_mean" in {message.tensor for message in found.failures}


def ended(program: Program, batches: list[Batch], initial: bool = True) -> Observation:
    """The last step of a few."""
    start = Snapshot(program)
    for batch in batches[:-1]:
        program.step(program, batch)
    seen = observed(program, batches[-1], initial=start.values if initial else None)
    return seen | {"flag/drawn": torch.tensor(1)} | {f"batch/{i}": t for i, t in enumerate(batches[-1])}


@pytest.mark.parametrize(("model", "ok"), [(Stream, True), (InThree, True), (Padded, False)])
def test_the_last_of_many_steps_is_judged_from_where_it_began(net, model, ok):
    workload = net(mode="forward", make=Stream)
    judge = Judge(workload, CPU, torch.float32, 7, REASSOCIATES)
    judge.draw(0, 5)
    batches = list(judge.batches)
    baseline = ended(workload.build(CPU, torch.float32, 7), batches)
    judge.recall(baseline)
    judge.yardstick(TIMED, baseline)
    findings = judge.judge(TIMED, ended(by(model)(workload.build(CPU, torch.float32, 7)), batches))
    assert [finding.tensor for finding in findings if not finding.ok] == ["output"] * (not ok)


def test_without_its_buffers_the_baseline_would_be_far_from_fp64(net):
    workload = net(mode="forward", make=Stream)
    judge = Judge(workload, CPU, torch.float32, 7, REASSOCIATES)
    judge.draw(0, 5)
    judge.yardstick(TIMED, ended(workload.build(CPU, torch.float32, 7), list(judge.batches), initial=False))
    findings = judge.judge(TIMED, ended(by(InThree)(workload.build(CPU, torch.float32, 7)), list(judge.batches), False))
    assert "of its size" in next(finding.unseen for finding in findings if finding.tensor == "output")


def test_only_buffers_that_earlier_steps_changed_travel(net):
    workload = net(mode="forward", make=Stream)
    program, batch = workload.build(CPU, torch.float32, 0), workload.batch(torch.Generator().manual_seed(1))
    program.model.register_buffer("mask", torch.ones(8))
    start = Snapshot(program)

    def names(seen: Observation) -> set[str]:
        return {name for name in seen if name.startswith("before/")}

    assert not names(observed(program, batch, initial=start.values)), "it is there what it was at first"
    assert names(observed(program, batch, initial=start.values)) == {"before/buffer/tail", "before/buffer/count"}
    start.restore(program)
    assert not names(observe(program, batch))
