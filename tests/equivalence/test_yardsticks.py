"""Yardsticks of one set of inputs: which runs count for which quantity, and how long results are held."""

from __future__ import annotations

import pytest
import torch

from optexp.equivalence.gates import Limits, Yardstick
from optexp.equivalence.quantities import Quantity
from optexp.equivalence.tensor_math import Error
from optexp.equivalence.yardsticks import Allowance, SetYardsticks
from optexp.support.tolerances import SMALL, TOLERANCES

ROW = TOLERANCES["float32"]


def quantity(count: int = SMALL, gradient: bool = False, rms: float = 0.0, scale: float = 1.0) -> Quantity:
    values = torch.zeros(count)
    return Quantity("out/y", values, values, Limits(ROW, gradient), scale=scale, found=Error(rms=rms, peak=rms))


def known(step: int = 0) -> SetYardsticks:
    found = SetYardsticks()
    found.follow(step, {"out/y": torch.ones(2), "flag/noisy": torch.tensor(0)})
    found.current.plain["out/y"] = Yardstick(1.0, 1.0)
    return found


@pytest.mark.parametrize(
    ("options", "always", "rms"),
    [({}, False, 2.0), ({}, True, 3.0), ({"gradient": True}, False, 3.0), ({"count": SMALL - 1}, False, 3.0)],
    ids=["a result", "arms in float64", "a gradient", "few elements"],
)
def test_noisy_runs_count_where_one_run_says_little(options: dict, always: bool, rms: float) -> None:
    found = known()
    found.reassociated["out/y"], found.noise["out/y"] = Yardstick(2.0), Yardstick(3.0)
    assert found.of(quantity(**options), always_spread=always).rms == rms


def test_plain_runs_are_of_one_step_and_others_of_all() -> None:
    found = known(step=0)
    found.reassociated["out/y"] = Yardstick(2.0)
    found.follow(1, {})
    assert (found.plain(quantity()).rms, found.of(quantity()).rms) == (0.0, 2.0)
    found.follow(0, {})
    assert found.plain(quantity()).rms == 1.0


def test_an_allowance_grows_with_the_quantity_and_does_not_shrink() -> None:
    allowed = Allowance(Yardstick(1.0, 2.0, torch.ones(2)), scale=4.0)
    assert (allowed.at(8.0).rms, allowed.at(8.0).peak, allowed.at(8.0).blocks.tolist()) == (2.0, 4.0, [2.0, 2.0])
    assert allowed.at(1.0).rms == 1.0


def test_every_allowed_error_counts_for_its_step_alone() -> None:
    found = known()
    for rms in (5.0, 4.0):
        found.current.allow(quantity(rms=rms))
    assert found.of(quantity()).rms == 5.0
    found.follow(1, {})
    assert found.of(quantity()).rms == 0.0


def test_results_of_the_step_before_are_copies_without_flags() -> None:
    found, results = SetYardsticks(), {"out/y": torch.ones(2), "flag/noisy": torch.tensor(0)}
    found.follow(0, results)
    found.follow(0, results)
    assert not found.earlier, "the same step again is no earlier one"
    found.follow(1, {})
    assert found.earlier.keys() == {"out/y"}
    assert found.earlier["out/y"].data_ptr() != results["out/y"].data_ptr()
