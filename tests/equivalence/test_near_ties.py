"""Near ties of a candidate are looked for, and excuse nothing but the gradients that they move."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import optexp.equivalence.candidate_step
import optexp.equivalence.judge
from optexp.equivalence.near_ties import TIED
from optexp.equivalence.noise import RUNS
from optexp.program import Program
from optexp.workloads.module import Module


def with_step(wrapper):
    """A candidate whose step is `wrapper(inner, program, batch)`."""

    def change(program: Program) -> Program:
        inner = program.step
        return replace(program, step=lambda program, batch: wrapper(inner, program, batch))

    return change


class Gates(nn.Module):
    """Sums of three, one of which is so small that it can be lost; `order` is that of adding up."""

    def __init__(self) -> None:
        super().__init__()
        terms = torch.randn(3, 64)
        terms[:, 0] = torch.tensor([1.0, 2.0**-26, -1.0])
        self.terms, self.order, self.lost = nn.Parameter(terms), (0, 2, 1), 0

    def forward(self):
        first, second, third = self.order
        z = self.terms[first] + self.terms[second] + self.terms[third]
        return torch.cat([z[: self.lost].detach(), z[self.lost :]])


class NearlyTied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gates, self.relu, self.linear = Gates(), nn.ReLU(), nn.Linear(192 + 64, 10)

    def forward(self, x):
        opened = self.relu(self.gates())
        return self.linear(torch.cat([x.flatten(1), opened.expand(len(x), 64)], 1))


@pytest.mark.parametrize(("runs", "lost", "ok"), [(16, 0, True), (0, 0, False), (16, 8, False)])
def test_near_ties_of_the_candidate_are_looked_for(check, net, monkeypatch, runs, lost, ok):
    monkeypatch.setattr(optexp.equivalence.judge, "RUNS", 0)  # that the baseline's own noise would meet
    monkeypatch.setattr(optexp.equivalence.candidate_step, "NEAR", runs)

    def change(program: Program) -> Program:
        program.model.gates.order, program.model.gates.lost = (0, 1, 2), lost
        return program

    found = check(net(mode="forward_backward", make=NearlyTied), change)
    assert found.ok is ok, found.headline
    assert ok or "grad/gates.terms" in found.headline
    assert (TIED in found.notes) is ok


class Times(nn.Module):
    """Differences of times that are so large that they are kept in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.since, self.linear, self.head = Since(), nn.Linear(1, 32), nn.Linear(32, 10)

    def forward(self, x):
        times = self.since(x.flatten(1)[:, :64])
        gaps = (times - times[:, :1]).to(x.dtype)
        return self.head(torch.sin(self.linear(gaps[..., None])).mean(1))


class Since(nn.Module):
    def forward(self, x):
        return x.double() + 1.7e9


class Choosing(nn.Module):
    """Asks the expert with the highest gate; both gates are 1 but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.linear = Choice(), nn.Linear(192, 10)
        self.experts = nn.ModuleList(nn.Linear(192, 10) for _ in range(2))

    def forward(self, x):
        chosen = self.experts[int(self.gates(x).argmax())]
        return self.linear(x.flatten(1)) + chosen(x.flatten(1))


class Choice(nn.Module):
    def forward(self, x):
        return x.new_tensor([1.0, 1.0 - 2.0**-23])


class Refusing(Choosing):
    """Will not have a gate above 1."""

    def forward(self, x):
        if float(self.gates(x).max()) > 1:
            raise ValueError("a gate is at most 1")
        return self.linear(x.flatten(1))


class Pooled(nn.Module):
    """The larger of two ones among zeros: noise in proportion to all of them is lost beside a one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.pool, self.head = Gated(), nn.AdaptiveMaxPool1d(1), nn.Linear(1, 10)

    def forward(self, x):
        return self.head(self.pool(self.linear(x.flatten(1))[:, None]).flatten(1))


class Gated(nn.Module):
    """Of two places in each row, far apart in a long one."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2**14))

    def forward(self, x):
        events = torch.zeros(len(x), 2**14, dtype=x.dtype)
        places = torch.stack([x[:, 0].argsort(), x[:, 1].argsort() + 2**13], 1)
        return events.scatter(1, places, 1.0) * self.weight + 0 * x.sum()


@pytest.mark.parametrize(("model", "runs"), [(Times, RUNS), (Choosing, 0), (Refusing, 0)])
def test_the_search_for_near_ties_excuses_nothing_else(check, net, monkeypatch, model, runs):
    monkeypatch.setattr(optexp.equivalence.judge, "RUNS", runs)

    def scaled(inner, program, batch):
        outputs = inner(program, batch)
        program.model.linear.weight.grad *= 0.9
        return outputs

    assert check(net(mode="forward_backward", make=model)).ok
    found = check(net(mode="forward_backward", make=model), with_step(scaled))
    assert "grad/linear.weight fails" in found.headline


def test_what_is_alike_and_large_stays_alike(check, net):
    def turned(inner, program, batch):
        outputs = inner(program, batch)
        program.model.linear.weight.grad *= -1
        return outputs

    pooled = net(mode="forward_backward", make=Pooled)
    assert check(pooled, dtype=torch.bfloat16).ok
    assert "grad/linear.weight fails" in check(pooled, with_step(turned), dtype=torch.bfloat16).headline


BY_HAND = """
import torch
from torch import nn

class Model(nn.Module):
    order, lost = (0, 2, 1), 0

    def __init__(self):
        super().__init__()
        terms = torch.randn(3, 512)
        terms[:, 0] = torch.tensor([1.0, 2.0**-26, -1.0])
        self.terms, self.head = nn.Parameter(terms), nn.Linear(192 + 512, 10)

    def forward(self, x):
        first, second, third = self.order
        z = torch.relu(self.terms[first] + self.terms[second] + self.terms[third])
        z = torch.cat([z[: self.lost].detach(), z[self.lost :]])
        return self.head(torch.cat([x, z.expand(len(x), 512)], 1))

def get_inputs(): return [torch.randn(8, 192), torch.randint(10, (8,))]

def train_step(model, batch, optimizer):
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    parameters = list(model.parameters())
    with torch.no_grad():
        for p, g in zip(parameters, torch.autograd.grad(loss, parameters)):
            p -= 0.01 * g
    return loss
"""


@pytest.mark.parametrize(("lost", "ok"), [(0, True), (64, False)])
def test_an_update_by_hand_of_a_gradient_that_a_near_tie_moves(check, tmp_path, monkeypatch, lost, ok):
    """Where nothing lies in p.grad, the tie shows in the update alone; its ReLU is no module that a hook sees."""
    monkeypatch.setattr(optexp.equivalence.judge, "RUNS", 0)
    path = tmp_path / "port.py"
    path.write_text(BY_HAND)

    def change(program: Program) -> Program:
        program.model.order, program.model.lost = (0, 1, 2), lost
        return program

    found = check(Module(path=str(path), mode="train"), change, steps=1, seeds=1)
    assert found.ok is ok, found.headline
    assert ok or "change/terms" in found.headline
    assert (TIED in found.notes) is ok
