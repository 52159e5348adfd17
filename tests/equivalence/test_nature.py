"""Less exact is told apart from wrong, whatever the gate that failed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from optexp.equivalence.nature import OTHER, ROUNDING, ROUNDING_OR_NEAR, nature
from optexp.equivalence.tensor_math import rms
from optexp.program import Program
from optexp.strategies.amp import under_autocast
from optexp.strategy import precision
from optexp.workloads.softmax import Softmax
from tests.equivalence.conftest import Net

UNIT = 2.0**-24
Change = Callable[[Tensor], Tensor]


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def running_sums(x: Tensor) -> Tensor:
    """Differences of running sums, which round by what all terms before have added up to."""
    sums = (x.float() + 1).cumsum(0)
    return torch.cat([sums[:1], sums.diff(dim=0)]).double() - 1


ROUNDED: dict[str, Change] = {
    "running sums": running_sums,
    "tf32": lambda x: torch.ldexp((torch.frexp(x).mantissa * 2**11).round() / 2**11, torch.frexp(x).exponent),
    "bfloat16": lambda x: x.bfloat16().double(),
    "noise": lambda x: x + 1e-4 * drawn(*x.shape, seed=1),
}
WRONG: dict[str, Change] = {
    "scaled": lambda x: 1.0001 * x,
    "another eps": lambda x: x * (1 + 1e-3 / (1 + drawn(len(x), 1, seed=2).abs())),
    "a column's bias": lambda x: x + 1e-3 * drawn(x.shape[1], seed=3),
    "shifted": lambda x: x + 1e-4,
    "clipped": lambda x: x.clamp(-2.5, 2.5),
    "one element": lambda x: x + 0.5 * torch.eye(*x.shape, dtype=x.dtype) * (torch.arange(len(x)) == 3)[:, None],
    "a tile": lambda x: torch.cat([torch.cat([x[:16, :16] * 0.9, x[:16, 16:]], 1), x[16:]]),
    "another tensor": lambda x: drawn(*x.shape, seed=4),
    "a dropped row": lambda x: torch.cat([x[:-1], torch.zeros_like(x[-1:])]),
}  # fmt: skip


@pytest.mark.parametrize("shape", [(512, 64), (64, 33), (8, 16, 64)])
@pytest.mark.parametrize("name", ROUNDED)
def test_what_is_less_exact_looks_like_rounding(name: str, shape: tuple[int, ...]) -> None:
    x = drawn(*shape)
    assert nature(ROUNDED[name](x), x, 1.0, UNIT).kind == ROUNDING


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_looks_like_another_result(name: str) -> None:
    x = drawn(512, 64)
    found = nature(WRONG[name](x), x, 1.0, UNIT)
    assert found.kind == OTHER, found
    assert found.why


def test_large_values_round_by_more() -> None:
    """Of a softmax most of the error lies in its few large elements."""
    x = torch.softmax(3 * drawn(256, 512), 1)
    assert nature(x.bfloat16().double(), x, rms(x), UNIT).kind == ROUNDING
    exponentials = torch.exp(3 * drawn(256, 512))
    short = exponentials / exponentials[:, :-1].sum(1, keepdim=True)
    assert nature(short, x, rms(x), UNIT).kind == OTHER


def test_few_elements_tell_only_by_their_size() -> None:
    one = torch.ones((), dtype=torch.float64)
    assert nature(one + 20 * UNIT, one, 1.0, UNIT).kind == ROUNDING
    assert nature(one + 2000 * UNIT, one, 1.0, UNIT).kind == ""
    assert nature(one * 1.1, one, 1.0, UNIT).kind == OTHER
    assert "is 100% of the tensor's size" in nature(one * 0.004, one, 1.0, UNIT).why
    assert "is 1800× the tensor's size" in nature(one * 1801, one, 1.0, UNIT).why
    assert nature(one, one, 1.0, UNIT).kind == ""


def test_much_is_rounding_where_the_baseline_rounds_by_much() -> None:
    """Where a mean of 64 hides a spread of an eighth, gradients of a norm round by parts of a hundred."""
    x = drawn(64, 33)
    off = x + 0.03 * drawn(64, 33, seed=1)
    assert nature(off, x, 1.0, UNIT, moved=0.004).kind == ROUNDING
    assert nature(off, x, 1.0, UNIT, moved=0.001).kind == OTHER


UPDATED = drawn(64, 16, seed=6), drawn(64, 16, seed=7)  # the parameter, and its change


@pytest.mark.parametrize(
    ("error", "kind", "why"),
    [
        (1e-4 * UPDATED[0], OTHER, "100% of the error is proportional to the parameter"),
        (1e-4 * drawn(64, 16, seed=8), "", "or another update"),
        (UNIT * drawn(64, 16, seed=8), ROUNDING, ""),
    ],
)
def test_an_update_is_no_less_exact_than_rounding_alone_makes_it(error: Tensor, kind: str, why: str) -> None:
    parameter, change = UPDATED
    found = nature(change + error, change, 1.0, UNIT, {"the parameter": parameter})
    assert found.kind == kind
    assert why in found.why


OTHER_UPDATES: dict[str, tuple[float, str]] = {
    "weight_decay": (0.9, "parameter"),
    "betas": (0.999, "value before|gradient"),
}


@pytest.mark.parametrize("name", OTHER_UPDATES)
def test_another_update_is_not_called_rounding(check, name: str) -> None:
    factor, cause = OTHER_UPDATES[name]

    def change(program):
        for group in program.optimizer.param_groups:
            group[name] = (factor * 0.9, 0.999) if name == "betas" else factor * group[name]
        return program

    found = check(Net(mode="train"), change)
    assert not found.ok
    assert ROUNDING not in {failure.nature for failure in found.failures}
    assert "another update" in found.headline
    assert any(re.search(f"proportional to (the|its) ({cause})", failure.message) for failure in found.failures)


class Sums(nn.Module):
    """Sums of rows in groups of eight."""

    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() + 1).unflatten(0, (-1, 8)).sum(1)


class ByRunningSums(Sums):
    def forward(self, x: Tensor) -> Tensor:
        sums = (x.abs() + 1).cumsum(0)[7::8]
        return torch.cat([sums[:1], sums.diff(dim=0)])


class OfSevenEighths(Sums):
    def forward(self, x: Tensor) -> Tensor:
        return (x.abs() + 1).unflatten(0, (-1, 8))[:, :7].sum(1)


class Summing(Softmax):
    def model(self) -> nn.Module:
        return Sums()


@pytest.mark.parametrize(("model", "kind"), [(ByRunningSums, ROUNDING), (OfSevenEighths, OTHER)])
def test_the_message_says_which(check, model: type[nn.Module], kind: str) -> None:
    def change(program):
        program.model.forward = model().forward
        return program

    found = check(Summing(rows=4096, columns=16), change)
    assert not found.ok
    assert {failure.nature for failure in found.failures} == {kind}
    assert ("less exact than the baseline by" in found.headline) is (kind == ROUNDING)
    assert (ROUNDING_OR_NEAR in found.headline) is (kind == ROUNDING)


@pytest.mark.parametrize(("noise", "words"), [(1e-5, ROUNDING_OR_NEAR), (5e-3, "or another result")])
def test_what_is_larger_than_float32_rounds_by_is_not_called_rounding_alone(check, noise: float, words: str) -> None:
    """Weights of an earlier step leave errors that look like those of a lower precision."""

    def change(program):
        x = drawn(4096, 16, seed=5).float()
        program.model.forward = lambda given: Sums()(given) + noise * rms(Sums()(given)) * Sums()(x).sub(14.4)
        return program

    found = check(Summing(rows=4096, columns=16), change)
    assert f"less exact than the baseline by {found.worst.error_ratio:.3g}×" in found.headline
    assert words in found.headline


class Choice(nn.Module):
    """The row of a table that scores choose which bfloat16 can hardly tell apart."""

    def __init__(self) -> None:
        super().__init__()
        self.score, self.table = nn.Linear(192, 16), nn.Embedding(16, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.table((1 + 1e-3 * self.score(x.flatten(1))).argmax(1))


def test_another_choice_at_lower_precision_is_not_blamed_on_the_strategy(check) -> None:
    def amp(program: Program) -> Program:
        return replace(program, forward=under_autocast(program.call, torch.device("cpu"), torch.bfloat16))

    found = check(Net(mode="forward", make=Choice), amp, precision("bfloat16"))
    assert not found.ok
    assert found.failures[0].message.startswith("plain autocast is as far off")
