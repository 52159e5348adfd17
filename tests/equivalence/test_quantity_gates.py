"""The gates on one quantity: what is not measured, and why a wrong value would have passed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from optexp.equivalence.arithmetic import Arithmetic
from optexp.equivalence.baseline_traits import BaselineTraits
from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.gates import Limits, Yardstick
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.quantities import Quantity, measured
from optexp.equivalence.quantity_gates import baseline_at, compare, rows_far_off, unseen_for
from optexp.strategy import REASSOCIATES, Contract, precision
from optexp.support.tolerances import TOLERANCES
from tests.equivalence.conftest import CPU, Net


def inputs(contract: Contract = REASSOCIATES, error: float = 0.0, **tensors: torch.Tensor) -> InputSet:
    """With a plain run of the baseline that returned `tensors`, `error` away from fp64."""
    fp64 = Fp64Reference(Net(mode="forward"), CPU, torch.float32, 7)
    found = InputSet(fp64, Arithmetic.of(contract, torch.float32), BaselineTraits())
    found.yardsticks.follow(0, {f"out/{name}": tensor for name, tensor in tensors.items()})
    found.yardsticks.current.plain |= {f"out/{name}": Yardstick(error, error) for name in tensors}
    return found


def quantity(value: torch.Tensor, reference: torch.Tensor | None = None, row: str = "float32") -> Quantity:
    exact = value if reference is None else reference
    wide = exact.double() if value.is_floating_point() else exact
    return next(measured([Quantity("out/y", value, wide, Limits(TOLERANCES[row]))]))


def test_nothing_to_compare_is_no_failure() -> None:
    finding = compare(inputs(), quantity(torch.zeros(0)))
    assert (finding.ok, finding.gate, finding.message) == (True, "EXACT", "y has no element to compare")


def test_integers_that_the_baseline_does_not_repeat_are_not_compared() -> None:
    found = inputs(y=torch.arange(3))
    assert not compare(found, quantity(torch.arange(3) + 1, torch.arange(3))).ok
    found.traits.unrepeated_integers.add("out/y")
    assert compare(found, quantity(torch.arange(3) + 1)).ok


def test_an_integer_may_be_that_of_a_noisy_run() -> None:
    found, tied = inputs(y=torch.arange(3)), quantity(torch.tensor([0, 2, 2]), torch.arange(3))
    assert not compare(found, tied).ok
    found.yardsticks.current.moved_integers["out/y"] = [torch.arange(4), torch.arange(3) + 1]
    assert compare(found, tied).ok


def test_an_error_as_the_baselines_passes_and_ten_times_as_much_fails() -> None:
    values = torch.linspace(1, 2, 64)
    found = inputs(error=1e-4, y=values)
    assert compare(found, quantity(values + 1e-4, values)).ok
    assert not compare(found, quantity(values + 1e-3, values)).ok


def test_an_overflow_at_lower_precision_fails_where_float32_has_room() -> None:
    values = torch.full((64,), 1e6)
    found = inputs(precision("float16"), y=values.half())
    finding = compare(found, quantity(values.half(), values, "float16"))
    assert (finding.gate, finding.ok) == ("G0", False)
    assert "64 of 64 elements are NaN or Inf, and finite in float64: float16 overflows here" in finding.message


def test_another_dtype_than_plain_autocasts_is_noted() -> None:
    values = torch.linspace(1, 2, 64)
    finding = compare(inputs(precision("bfloat16"), y=values.bfloat16()), quantity(values, row="bfloat16"))
    assert finding.ok
    assert finding.message == "dtype float32 where plain autocast has bfloat16"


@pytest.mark.parametrize(("error", "hidden"), [(1e-6, False), (0.5, True)])
def test_a_limit_as_large_as_the_tensor_sees_nothing(error: float, hidden: bool) -> None:
    values = torch.linspace(1, 2, 64)
    found = inputs(error=error, y=values)
    found.yardsticks.spread["out/y"] = error
    given = quantity(values + error, values)
    why, parted = unseen_for(found, given, compare(found, given))
    assert (bool(why), parted) == (hidden, False)


def test_equal_bits_hide_nothing_and_tell_of_float64() -> None:
    values = torch.linspace(1, 2, 64)
    found = inputs(error=0.01, y=values)
    found.yardsticks.spread["out/y"] = 1e-7
    given = quantity(values + 0.01, values)
    assert unseen_for(found, given, replace(compare(found, given), bitwise=True)) == ("", True)


def test_rows_far_off_are_counted_at_lower_precision_alone() -> None:
    values = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))
    assert rows_far_off(inputs(y=values), quantity(-values, values)) is None
    assert rows_far_off(inputs(precision("bfloat16"), y=values), quantity(-values, values, "bfloat16")) == (8, 0, 8)


def test_the_baselines_element_of_a_change_is_its_change() -> None:
    found = inputs()
    found.yardsticks.follow(0, {"before/param/w": torch.tensor([1.0]), "after/param/w": torch.tensor([1.5])})
    change = Quantity("change/w", torch.zeros(1), torch.zeros(1), Limits(TOLERANCES["float32"]))
    assert float(baseline_at(found, change, (0,))) == 0.5
    assert baseline_at(found, quantity(torch.zeros(1)), (0,)) is None
