"""Scattered elements far below a result's RMS, as small probabilities: they must be right at all."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optexp.equivalence import determined, quantities, tensor_math
from optexp.equivalence.gates import Limits
from optexp.equivalence.quantities import Quantity
from optexp.support.tolerances import TOLERANCES


class Spread(nn.Module):
    """Results of many sizes.

    how: computes them
    """

    def __init__(self, how):
        super().__init__()
        self.linear, self.how = nn.Linear(192, 64), how

    def forward(self, x):
        return self.how(self.linear(x.flatten(1)))


def softmax(y):
    return torch.softmax(40 * y, -1)


def with_rest(y, third):
    """Beside y, what is left where two thirds of it cancel: exactly nothing if both are rounded alike."""
    return torch.cat([y, (y / 3 - third) + 1e-9 * y], 1)


RIGHT = {
    "softmax": (softmax, lambda y: (40 * y - torch.logsumexp(40 * y, -1, keepdim=True)).exp()),
    "shifted softmax": (softmax, lambda y: torch.softmax(40 * (y - y[:, :1]), -1)),
    "sigmoid": (lambda y: torch.sigmoid(40 * y), lambda y: 1 / (1 + torch.exp(-40 * y))),
    "gelu": (lambda y: nn.functional.gelu(8 * y), lambda y: 4 * y * (1 + torch.erf(8 * y / 2**0.5))),
    "exact by luck": (lambda y: with_rest(y, y / 3), lambda y: with_rest(y, (y + 2) / 3 - 2 / 3)),
    "residual": (lambda y: y + y.flip(0) - 1, lambda y: y - 1 + y.flip(0)),
}
WRONG = {
    "pruned": (softmax, lambda y: torch.where(softmax(y) < 1e-9, 0, softmax(y))),
    "clamped": (lambda y: torch.exp(12 * y), lambda y: torch.exp((12 * y).clamp(min=-1))),
    "absolute": (lambda y: torch.sigmoid(40 * y), lambda y: (1 + torch.tanh(20 * y)) / 2),
}


def replaced(how):
    def change(program):
        program.model.how = how
        return program

    return change


@pytest.mark.parametrize("name", RIGHT)
def test_other_ways_to_the_same_numbers_pass(check, net, name):
    first, other = RIGHT[name]
    found = check(net(mode="forward", make=lambda: Spread(first), batch_size=64), replaced(other))
    assert found.ok, found.headline


@pytest.mark.parametrize("name", WRONG)
def test_elements_that_are_something_else_fail(check, net, name):
    first, other = WRONG[name]
    found = check(net(mode="forward", make=lambda: Spread(first), batch_size=64), replaced(other))
    assert not found.ok
    assert found.worst.tensor.startswith("output (elements near 2^-")
    row, column = found.worst.element.index
    assert max(row, column) < 64


@pytest.mark.parametrize("loose", [1, 30], ids=["one", "nearly all"])
def test_elements_that_a_rounding_of_the_inputs_moves_are_left_out(loose: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the rest of equal scores with opposite values: no wrong element beside them is."""
    right = torch.full((4, 10), 1e-9, dtype=torch.float64)
    moved, value, columns = right.clone(), right.clone(), torch.arange(32)
    moved.view(-1)[:loose] = value.view(-1)[:loose] = 1e-4
    value[-1] = 2e-9
    monkeypatch.setattr(determined, "with_rounded_inputs", lambda *_: {"out/output": moved})
    start = SimpleNamespace(start_of=lambda *_: {})
    inputs: Any = SimpleNamespace(fp64=start, arithmetic=SimpleNamespace(row=TOLERANCES["float32"]))
    flat = value.view(-1)[columns], right.view(-1)[columns]
    limits = Limits(TOLERANCES["float32"], gross=True)
    tiny = Quantity(
        "out/output (elements near 2^-30 of its size)", *flat, limits, columns=columns, axis=0, within=(4, 10)
    )
    found = determined.determined(inputs, 0, {}, tiny)
    if loose == 30:
        assert found is None
    else:
        assert found is not None
        assert found.columns is not None
        assert found.columns.tolist() == list(range(1, 32))
        assert found.found.rms > 0.1 * found.scale


@pytest.mark.parametrize("wrong", [0.0, 0.25], ids=["right", "a quarter is wrong"])
def test_of_many_tiny_elements_evenly_many_are_judged(wrong: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 1.6 billion elements may be tiny; a few rare ones of another order are all judged."""
    monkeypatch.setattr(quantities, "SAMPLED", 2**12)
    monkeypatch.setattr(tensor_math, "CACHED", 2**14)
    generator = torch.Generator().manual_seed(0)
    right = torch.rand(2**18, generator=generator, dtype=torch.float64) + 1
    right[::2] *= 2.0**-20
    right[1 : 2**18 : 2**12] = 2.0**-30
    other = right.clone()
    if wrong:
        other[: round(wrong * len(other))] *= 1.5
    whole = Quantity("out/output", other.float(), right, Limits(TOLERANCES["float32"]))
    frequent, rare = quantities.measured(quantities.parts(whole))
    assert "2^-16" in frequent.name
    assert 2**12 <= len(frequent.reference) <= 2 * 2**12
    assert frequent.columns is not None
    assert int(frequent.columns.min()) < 2**14 < 2**18 - 2**14 < int(frequent.columns.max())
    assert torch.equal(right[frequent.columns], frequent.reference)
    assert len(rare.reference) == 2**6
    assert (frequent.found.rms > 0.1 * frequent.scale) is bool(wrong)
