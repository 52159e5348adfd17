"""Results in fp64 hold for one set of inputs, on one device, from one initial state."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.input_families import NORMAL
from tests.equivalence.conftest import CPU


@pytest.fixture
def fp64(net: type) -> Fp64Reference:
    """After a step from the state that all arms share."""
    found = Fp64Reference(net(mode="forward"), CPU, torch.float32, 7)
    found.draw(0, 2, NORMAL)
    found.step(0, found.initial)
    return found


def test_a_step_from_the_shared_state_is_computed_once(fp64: Fp64Reference) -> None:
    assert fp64.step(0, fp64.initial) is fp64.step(0, fp64.initial)
    assert fp64.step(0, dict(fp64.initial)) is not fp64.step(0, fp64.initial)


@pytest.mark.parametrize(
    "change",
    [
        lambda fp64: fp64.draw(1, 2, NORMAL),
        lambda fp64: fp64.rest(),
        lambda fp64: fp64.settle(CPU),
        lambda fp64: fp64.turn_parameters(),
        lambda fp64: fp64.follow(["param/1.weight"]),
    ],
    ids=["draw", "rest", "settle", "turn_parameters", "follow"],
)
def test_results_end_with_what_they_were_computed_from(
    fp64: Fp64Reference, change: Callable[[Fp64Reference], None]
) -> None:
    before = fp64.results
    assert before.golden
    change(fp64)
    assert not fp64.results.golden
    assert before.golden, "a new object, and not the old one emptied"


def test_steps_aside_are_not_remembered(fp64: Fp64Reference) -> None:
    before = fp64.results
    with fp64.aside():
        fp64.step(1, fp64.initial)
    assert fp64.results is before
    assert before.golden.keys() == {0}
