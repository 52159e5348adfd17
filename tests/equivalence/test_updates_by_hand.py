"""Updates by hand beside an optimizer: a rate or a decay that is a little off is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optexp.equivalence.doubtful_elements import most_elements
from optexp.equivalence.gates import TOLERANCES, Limits
from optexp.equivalence.other_changes import SHARES, SIGNS, allowed
from optexp.equivalence.quantities import Quantity, measured, source
from optexp.workloads.module import Module
from tests.equivalence.test_doubtful_elements import otherwise, written

UPDATE = "p.sub_(p.grad + 0.02 * p, alpha=0.1)"


def test_the_same_update_in_another_order_passes(check, tmp_path: Path) -> None:
    path = written(tmp_path / "port.py", UPDATE)
    right = written(tmp_path / "reordered.py", "p.mul_(1 - 0.1 * 0.02).sub_(0.1 * p.grad)", reordered=True)
    found = check(Module(path=str(path), mode="train"), otherwise(right), seeds=2)
    assert found.ok, found.headline


@pytest.mark.parametrize("wrong", [UPDATE.replace("0.1)", "0.101)"), UPDATE.replace("0.02", "0.01")])
def test_an_update_that_is_a_little_off_is_refused(check, tmp_path: Path, wrong: str) -> None:
    path = written(tmp_path / "port.py", UPDATE)
    found = check(Module(path=str(path), mode="train"), otherwise(written(tmp_path / "wrong.py", wrong)))
    assert not found.ok
    assert found.worst.tensor.startswith("change/")


def test_what_an_error_of_the_gradient_may_turn_is_allowed_more() -> None:
    gradient, parameter = torch.randn(2, 512, dtype=torch.float64)
    assert allowed(-0.1 * gradient - 1e-6 * parameter, gradient, parameter) == pytest.approx(SHARES, rel=1e-3)
    for other in (gradient.sign(), -0.1 * gradient / gradient.norm() + parameter.sin()):
        assert allowed(other, gradient, parameter) == SIGNS
    assert allowed(gradient, None, None) == SIGNS
    assert allowed(gradient[:4], gradient[:4], None) == SIGNS


def test_a_change_of_nan_is_no_sum_of_shares() -> None:
    """Gradients through a root of zero are NaN in the baseline and in fp64, where LAPACK raises."""
    gradient, parameter = torch.randn(2, 512, dtype=torch.float64)
    assert allowed(gradient * torch.nan, gradient * torch.nan, parameter) == SIGNS


def test_a_large_share_of_the_parameter_leaves_no_room_for_an_error() -> None:
    gradient, parameter = torch.randn(2, 512, dtype=torch.float64)
    assert allowed(-0.01 * gradient - parameter, gradient, parameter)[0] < 0.02 * SHARES[0]


SIGNS_OF = "p.sub_(p.grad.sign(), alpha=%s)"


@pytest.mark.parametrize(("rate", "right"), [("0.001", True), ("0.00101", False)])
def test_a_wrong_rate_of_signs_shows_in_most_elements(check, tmp_path: Path, rate: str, right: bool) -> None:
    path = written(tmp_path / "port.py", SIGNS_OF % "0.001")
    other = written(tmp_path / "other.py", SIGNS_OF % rate, reordered=True)
    found = check(Module(path=str(path), mode="train"), otherwise(other))
    assert found.ok is right, found.headline


def test_some_elements_may_have_another_sign() -> None:
    reference = torch.ones(200, dtype=torch.float64)
    turned, slower = reference.clone(), 0.99 * reference
    turned[:4] = -1
    row = Limits(TOLERANCES["float32"])
    parts = [next(most_elements(next(measured([Quantity("change/p", v, reference, row)])))) for v in (turned, slower)]
    assert [part.found.rms for part in parts] == [0.0, pytest.approx(0.01)]
    assert source(parts[0].name) == "after/param/p"
    assert not [*most_elements(replace(parts[0], value=turned[:8], reference=reference[:8]))]
