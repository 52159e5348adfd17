"""How elements of random results scatter together: masks that are shared are seen, honest ways to draw pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.equivalence import randomness, scatter
from optexp.equivalence.randomness import GATE
from optexp.equivalence.two_samples import alike
from optexp.program import Snapshot
from optexp.records.verification import Finding, Scatter

CPU, UNIT, RATE = torch.device("cpu"), 2.0**-24, 0.1
Drop = Callable[[Tensor, int], Tensor]  # of a layer's activations and its number


class Mlp(nn.Module):
    """Two hidden layers with dropout."""

    def __init__(self, drop: Drop) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(192, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.drop = drop

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(F.gelu(self.first(x.flatten(1))), 0)
        return self.last(self.drop(F.gelu(self.second(x)), 1))


def kept(*shape: int, rate: float = RATE) -> Tensor:
    return (torch.rand(shape) >= rate) / (1 - rate)


@dataclass
class OfTheFirstLayer:
    """A mask that later layers share."""

    mask: Tensor | None = None

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        if layer == 0 or self.mask is None:
            self.mask = kept(*x.shape)
        return x * self.mask


@dataclass
class ByTheFirstStep:
    """A mask that one layer keeps for all later steps; the other layer draws."""

    mask: Tensor | None = None

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        if layer == 1:
            return F.dropout(x, RATE)
        self.mask = kept(*x.shape) if self.mask is None else self.mask
        return x * self.mask


@dataclass
class OneOfAFew:
    """Masks that the first step draws, and of which each layer takes one."""

    masks: tuple[Tensor, ...] = ()

    def __call__(self, x: Tensor, layer: int) -> Tensor:
        self.masks = self.masks or tuple(kept(*x.shape) for _ in range(64))
        return x * self.masks[int(torch.randint(64, ()))]


def in_the_first_layer(x: Tensor, layer: int) -> Tensor:
    """The other layer draws in each step."""
    frozen = torch.rand(x.shape, generator=torch.Generator().manual_seed(0)) >= RATE
    return x * frozen / (1 - RATE) if layer == 0 else F.dropout(x, RATE)


WRONG: dict[str, tuple[Drop, str]] = {
    "neighbours": (lambda x, _: x * kept(len(x), 32).repeat_interleave(2, 1), "neighbours along dimension"),
    "two halves": (lambda x, _: x * kept(len(x), 32).repeat(1, 2), "two halves along dimension"),
    "layers": (OfTheFirstLayer(), "layers scatter together"),
    "two rows": (lambda x, _: x * kept(len(x) // 2, 64).repeat(2, 1), "elements"),
    "rate": (lambda x, _: x * kept(*x.shape, rate=0.11), "elements have a variance of 1.1"),
    "one layer keeps its mask": (ByTheFirstStep(), "elements have a variance of 0."),
    "one of a few": (OneOfAFew(), "elements have other variances"),
    "one frozen layer": (in_the_first_layer, "elements have a variance of 0."),
}


def other_stream(x: Tensor, layer: int) -> Tensor:
    """Dropout by other random numbers, as a fused kernel draws them."""
    torch.rand(7)
    return F.dropout(x, RATE)


Thrown = tuple[Mapping[str, Tensor], Mapping[str, tuple[int, ...]]]


def thrown(net, drop: Drop, mode: str = "forward_backward", draws: int = 128) -> Thrown:
    workload = net(mode=mode, batch_size=32, make=lambda: Mlp(drop))
    program = workload.build(CPU, torch.float32, 0)
    batch, elements = workload.batch(torch.Generator().manual_seed(1)), scatter.Elements()
    randomness.throw(program, batch, Snapshot(program), UNIT, elements, lambda done: done < draws)
    return elements.stacked(), elements.shapes


def compared(candidate: Thrown, baseline: Thrown) -> tuple[list[Finding], Scatter]:
    return scatter.compare(candidate[0], baseline[0], baseline[1], GATE, UNIT)


@pytest.fixture(scope="module")
def baseline() -> list[Thrown]:
    return []


def plain(net, baseline: list[Thrown]) -> Thrown:
    if not baseline:
        baseline.append(thrown(net, lambda x, _: F.dropout(x, RATE)))
    return baseline[0]


@pytest.mark.parametrize("name", WRONG)
def test_wrong_masks_are_seen(net, baseline: list[Thrown], name: str) -> None:
    drop, words = WRONG[name]
    findings, _ = compared(thrown(net, drop), plain(net, baseline))
    assert any(words in finding.message for finding in findings), [finding.message for finding in findings]
    assert not any(finding.ok for finding in findings)


def variational(x: Tensor, layer: int) -> Tensor:
    torch.rand(layer + 1)
    return x * kept(1, x.shape[1])


HONEST: dict[str, tuple[Drop, Drop]] = {
    "other stream": (lambda x, _: F.dropout(x, RATE), other_stream),
    "by hand": (lambda x, _: F.dropout(x, RATE), lambda x, _: x * torch.bernoulli(torch.full_like(x, 0.9)) / 0.9),
    "one mask for all rows in both": (lambda x, _: x * kept(1, 64), variational),
    "channels": (
        lambda x, _: F.dropout1d(x.view(-1, 8, 8), RATE).view(-1, 64),
        lambda x, _: x * kept(len(x), 8).repeat_interleave(8, 1),
    ),
    "stochastic depth": (lambda x, _: x + x.sin() * kept(1), lambda x, _: x + x.sin() * (torch.rand(3) > 0.1)[2] / 0.9),
    "noise": (
        lambda x, _: x + 0.1 * torch.randn_like(x),
        lambda x, _: x + torch.empty_like(x).normal_(0, 0.1).flip(0),
    ),
}


@pytest.mark.parametrize("name", HONEST)
def test_honest_randomness_passes(net, name: str) -> None:
    ours, theirs = (thrown(net, drop, draws=64) for drop in HONEST[name])
    findings, facts = compared(ours, theirs)
    assert findings == []
    assert facts.tests > 20


def test_outputs_alone_show_shared_masks(net) -> None:
    honest = thrown(net, lambda x, _: F.dropout(x, RATE), "forward", 384)
    assert compared(thrown(net, other_stream, "forward", 384), honest)[0] == []
    assert compared(thrown(net, WRONG["neighbours"][0], "forward", 384), honest)[0] != []


def test_luck_raises_few_alarms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heavy tails, common factors, and few values: 5 % is allowed, over all tests of a comparison."""
    monkeypatch.setattr(scatter, "ALARM", 0.05)
    generator = torch.Generator().manual_seed(0)

    def draws() -> dict[str, Tensor]:
        common = torch.randn(64, 1, 1, generator=generator)
        rare = (torch.rand(64, 16, 1, generator=generator) < 0.05) * 1.0
        values = torch.randn(64, 16, 8, generator=generator)
        return {"out/a": values + common, "grad/b": values**3 * common, "grad/c": values * 1e-2 + rare}

    shapes = dict.fromkeys(("out/a", "grad/b", "grad/c"), (16, 8))
    alarms = sum(bool(scatter.compare(draws(), draws(), shapes, GATE, UNIT)[0]) for _ in range(100))
    assert alarms <= 5


def test_p_is_an_upper_bound() -> None:
    """Of a kernel of one direction, where labels' products scatter most."""
    generator = torch.Generator().manual_seed(0)
    for width in (1, 3, 40):
        found = []
        for _ in range(500):
            values = torch.randn(128, width, generator=generator)
            found.append(alike(values @ values.mT))
        for level in (0.1, 0.01):
            assert sum(p < level for p in found) <= 500 * level


def test_rounding_is_not_compared() -> None:
    """What scatters by rounding, and what fills a mask, has no test; elements beside it do."""
    generator = torch.Generator().manual_seed(0)

    def draws(size: float) -> dict[str, Tensor]:
        rounding = 1 + size * torch.randn(64, 8, generator=generator)
        filled = torch.full((64, 8), -1e9)
        values = torch.randn(64, 8, generator=generator)
        return {"out/constant": rounding, "out/masked": torch.cat([filled, values], 1)}

    shapes = {"out/constant": (8,), "out/masked": (16,)}
    findings, facts = scatter.compare(draws(1e-5), draws(1e-7), shapes, GATE, UNIT)
    assert findings == []
    assert facts.tests == 5
    assert facts.visible is not None
    still = {"out/constant": torch.ones(64, 8)}
    assert scatter.compare(still, still, shapes, GATE, UNIT) == ([], Scatter(64, 0, 1.0, None))


def test_elements_of_large_results_are_few() -> None:
    elements = scatter.Elements()
    for _ in range(2):
        elements.add(
            {"grad/wide": torch.randn(3000, 500), "out/long": torch.randn(4, 300, 20, 20), "out/loss": torch.ones(())}
        )
    kept = elements.stacked()
    assert {name: tuple(tensor.shape) for name, tensor in kept.items()} == {
        "grad/wide": (2, 64, 64),
        "out/long": (2, 4, 16, 16),
        "out/loss": (2,),
    }
    assert elements.shapes["out/long"] == (4, 300, 400)
    assert elements.wanted <= scatter.MANY
