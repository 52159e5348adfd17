"""What a repeated step was given is what the baseline's was: by the baseline's names."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from optexp.equivalence.effects import broken_effects
from optexp.equivalence.judge import Judge
from optexp.equivalence.observation import observe
from optexp.errors import NoReference
from optexp.strategy import REASSOCIATES

FLAGS = {
    "flag/inputs_intact": torch.tensor(1),
    "flag/finished": torch.tensor(1),
    "flag/plain": torch.tensor(1),
    "flag/device": torch.tensor([1]),
    "flag/aliases": torch.tensor([0]),
    "flag/drawn": torch.tensor(1),
}
THEIRS = {"batch/0": torch.ones(2), "batch/1": torch.zeros(2)}


@pytest.mark.parametrize(
    ("given", "broken"),
    [
        (THEIRS, False),
        ({}, True),
        ({"batch/0": torch.ones(2)}, True),
        ({**THEIRS, "batch/2": torch.ones(2)}, True),
        ({**THEIRS, "batch/1": torch.ones(2)}, True),
    ],
)
def test_a_step_that_was_given_another_batch_is_broken(given: dict[str, Tensor], broken: bool) -> None:
    found = list(broken_effects({**FLAGS, **given}, {**FLAGS, **THEIRS}, None, False, False))
    assert [finding.message for finding in found] == [
        "the timed step was not given the batch that the baseline's was"
    ] * broken


def test_a_buffer_may_be_as_it_was_at_first_in_one_arm_alone() -> None:
    moved = {"before/buffer/count": torch.ones(1)}
    assert not list(broken_effects({**FLAGS, **moved}, FLAGS, None, False, False))
    assert not list(broken_effects(FLAGS, {**FLAGS, **moved}, None, False, False))


def test_a_baseline_that_writes_to_its_batch_is_told_so() -> None:
    writes = FLAGS | {"flag/inputs_intact": torch.tensor(0)}
    with pytest.raises(NoReference, match="writes to its own input"):
        list(
            broken_effects(
                {**writes, "batch/0": torch.ones(2)}, {**writes, "batch/0": torch.zeros(2)}, None, False, False
            )
        )


def test_a_batch_that_holds_what_the_model_wrote_is_told_so_though_it_writes_the_same_again(net: type) -> None:
    """A cache that is filled already: the last step leaves its batch as it finds it, but for rounding."""
    judge = Judge(net(mode="forward"), torch.device("cpu"), torch.float32, 7, REASSOCIATES)
    judge.draw(0, 1)
    program = net(mode="forward").build(torch.device("cpu"), torch.float32, 7)
    seen = observe(program, judge.batches[0])
    judge.yardstick(0, seen | {"flag/inputs_intact": torch.tensor(0)})  # on a fresh one
    seen |= {"flag/drawn": torch.tensor(1), "batch/0": torch.ones(2)}
    judge.yardstick(0, seen)
    with pytest.raises(NoReference, match="writes to its own input"):
        judge.judge(0, seen | {"batch/0": torch.ones(2) + 1e-6})


@pytest.mark.parametrize(("moved", "broken"), [(2.0**-23, False), (2.0**-12, True)])
def test_state_that_begins_as_a_norm_may_differ_by_rounding(moved: float, broken: bool) -> None:
    """An optimizer such as LAMB writes a norm of its parameter first, whose sum another implementation orders anew."""
    norm = torch.tensor(3.0)
    seen = {**FLAGS, "before/optimizer/weight/norm": norm * (1 + moved)}
    baseline = {**FLAGS, "before/optimizer/weight/norm": norm}
    found = list(broken_effects(seen, baseline, {"optimizer/weight/norm": norm}, True, False))
    assert [finding.message for finding in found] == ["training does not start from the baseline's state"] * broken
