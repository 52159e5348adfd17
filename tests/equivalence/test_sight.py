"""Nothing is verified that would not have been seen to be wrong, and references of another program are named."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from optexp.equivalence.cancellation import Terms
from optexp.equivalence.parting import first_apart, watched
from optexp.equivalence.sight import unseen

U = 2.0**-24
BF16 = 2.0**-8


def seen(**changed: float) -> tuple[str, bool]:
    usual = {"plain": U, "limit": 16 * U, "spread": U, "scale": 1.0, "terms": lambda: 1.0, "unit": U, "coarsest": 2 * U}
    given = usual | changed
    return unseen(**({"found": given["limit"]} | given))


def test_a_limit_of_a_few_roundings_is_seen() -> None:
    assert seen() == ("", False)


def test_a_limit_that_lets_anything_pass_is_not() -> None:
    why, parted = seen(plain=0.02, limit=0.5, spread=0.02)
    assert "0.5 of its size would pass" in why
    assert not parted


def test_what_is_known_to_be_right_needs_no_tighter_limit() -> None:
    """A gradient that hangs on a tie may be a tenth of its size off; this one is not."""
    assert not seen(found=3 * U, limit=0.1, spread=0.05)[0]
    assert seen(found=0.05, limit=0.1, spread=0.05)[0]


@pytest.mark.parametrize(("unit", "limit", "is_seen"), [(U, 0.019, True), (U, 0.03, False), (BF16, 0.12, True)])
def test_two_percent_or_32_units_are_the_bound(unit: float, limit: float, is_seen: bool) -> None:
    assert (not seen(limit=limit, spread=limit, unit=unit)[0]) is is_seen


def test_the_terms_of_what_is_seen_without_them_are_not_asked_for() -> None:
    assert not seen(limit=0.01, spread=0.2, unit=BF16, terms=pytest.fail)[0]


def test_a_sum_that_cancels_is_seen_beside_its_terms_where_precision_is_low() -> None:
    assert not seen(limit=0.5, spread=0.2, unit=BF16, terms=lambda: 10.0)[0]
    assert seen(limit=0.5, spread=0.2, terms=lambda: 10.0)[0]


def test_a_gradient_that_is_little_but_the_rounding_of_its_terms_is_seen_beside_them() -> None:
    """A scale before a batch norm: its gradient is 7e-7 of its terms, and errs by twice its size."""
    small = {"scale": 10 * U, "plain": 10 * U, "spread": 10 * U}
    assert not seen(**small, limit=22 * U)[0]
    assert seen(**small, limit=40 * U)[0], "more than rounding"
    assert seen(scale=40 * U, plain=10 * U, spread=10 * U, limit=22 * U)[0], "float32 can compute it"


def test_a_baseline_that_rounding_does_not_explain_has_another_reference() -> None:
    why, parted = seen(plain=0.003, limit=0.012, spread=2 * U)
    assert parted
    assert "0.003 of its size from float64" in why
    assert not seen(plain=0.003, limit=0.012, spread=2 * U, coarsest=2.0**-10)[1], "TF32 explains it"


def test_nothing_hides_in_a_limit_of_zero() -> None:
    assert seen(plain=0.0, limit=0.0, spread=0.0) == ("", False)


# --- on programs -------------------------------------------------------------------------------------------------


class Halves(nn.Module):
    """Another program in float64: what depends on the width of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.lin, self.out = nn.Linear(192, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.lin(x.flatten(1))
        return self.out(hidden * (1.5 if hidden.element_size() == 8 else 1.0))


class Eps(nn.Module):
    """An epsilon of the dtype's own is the same program: float64 takes that of the arms."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(192, 8)

    def eps(self, p: torch.Tensor) -> float:
        return torch.finfo(p.dtype).eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        p = (20 * self.lin(x.flatten(1))).softmax(-1)
        return (p + self.eps(p)).log()


def doubled(program):
    """The same numbers by another way: no bit need be the same."""
    forward = program.call
    return replace(program, forward=lambda x: (forward(x.double().float()) * 3) / 3)


def test_the_module_where_float64_is_another_program_is_named(check, net) -> None:
    found = check(net(mode="forward", make=Halves), doubled)
    assert found.ok
    assert found.undecided.startswith("a wrong output could not be told from a right one")
    assert "first in out (Linear)" in found.undecided
    assert not check(net(mode="forward", make=Halves)).undecided, "equal bits need no reference"


class EpsByBranch(Eps):
    """The same by a comparison of dtypes, as image models have it."""

    def eps(self, p: torch.Tensor) -> float:
        return 1e-5 if p.dtype == torch.float32 else 1e-3


@pytest.mark.parametrize("make", [Eps, EpsByBranch])
def test_an_epsilon_of_the_dtype_is_that_of_the_arms(check, net, make: type[Eps]) -> None:
    def wrong(program):
        program.model.eps = lambda p: 1e-2
        return program

    right = check(net(mode="forward", make=make), doubled)
    assert right.ok, right.headline
    assert not right.undecided
    assert not check(net(mode="forward", make=make), wrong).ok


def test_parting_names_the_first_module() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with watched(model) as before:
        model(x)
    with torch.no_grad():
        model[2].bias += 1
    with watched(model) as after:
        model(x)
    assert first_apart(before, before) == ""
    assert first_apart(before, after) == "2 (Linear)"


# --- zero but for rounding ---------------------------------------------------------------------------------------


def normalised() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))


def test_the_terms_of_a_gradient_that_cancels_are_known() -> None:
    torch.manual_seed(0)
    model = normalised().double()
    with Terms() as terms:
        model(torch.randn(16, 3, 8, 8, dtype=torch.float64)).square().sum().backward()
    bias, weight = model[0].bias, model[0].weight
    assert bias.grad is not None
    assert weight.grad is not None
    assert terms.of(bias.grad) > 1e10 * float(bias.grad.abs().max())
    assert not terms.of(weight.grad)


def test_terms_that_cancelled_themselves_count_in_sums_of_them() -> None:
    """A bias that adds the same to all places: first each image's sum cancels, then there is nothing left to add."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.ReflectionPad2d(1), nn.Conv2d(8, 8, 3),
        nn.InstanceNorm2d(8), nn.Conv2d(8, 4, 3),
    ).double()  # fmt: skip
    with Terms() as terms:
        model(torch.randn(4, 3, 9, 9, dtype=torch.float64)).square().sum().backward()
    weight, bias = model[1].weight.grad, model[1].bias.grad
    assert weight is not None
    assert bias is not None
    assert terms.of(bias) > 1e10 * float(bias.abs().max())
    assert not terms.of(weight)


def test_a_bias_before_a_batch_norm_is_verified_by_its_terms(check, net) -> None:
    """Rounding is all there is of its gradient; a bias that does something is seen."""

    def scaled(by: float):
        def change(program):
            conv = program.model[0]
            conv.bias.register_hook(lambda gradient: gradient + by)
            return program

        return change

    workload = net(mode="forward_backward", make=normalised, batch_size=32)
    assert check(workload, scaled(1e-9)).ok
    assert not check(workload, scaled(1e-9)).undecided
    assert not check(workload, scaled(1e-3)).ok
