"""Updates by hand beside an optimizer: a rate or a decay that is a little off is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from optexp.equivalence.other_changes import SHARES, SIGNS, allowed
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


def test_a_large_share_of_the_parameter_leaves_no_room_for_an_error() -> None:
    gradient, parameter = torch.randn(2, 512, dtype=torch.float64)
    assert allowed(-0.01 * gradient - parameter, gradient, parameter)[0] < 0.02 * SHARES[0]
