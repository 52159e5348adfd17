"""What an arm remembers of the blocks that it timed."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from optexp.arm import Arm, Spec
from optexp.workloads.gelu import Gelu


def made() -> Arm:
    arm: Any = Arm()
    arm.batches = [(torch.zeros(1),)] * 4
    arm.program = SimpleNamespace(trains=False, optimizer=None, buffers=dict)
    return arm  # type: ignore[no-any-return]


def test_the_block_that_is_repeated_ends_on_another_batch_than_the_step_before_it():
    for _ in range(20):
        arm = made()
        for steps in (8, 7, 12, 9, 4):
            arm._keep(2, steps, {"output": torch.full((1,), float(steps))})
        assert arm.kept is not None
        assert arm.kept.steps in (9, 11)
        assert arm.kept.outputs["output"].item() == arm.kept.steps - 2
        assert arm.timed() == {"out/output": (arm.kept.steps - 2, arm.kept.steps - 2)}


def test_a_block_that_does_not_tell_is_better_than_none():
    arm = made()
    arm._keep(2, 8, {"output": torch.zeros(1)})
    assert arm.timed_steps() == 10


@pytest.mark.parametrize("kinds", [2, 4, 5])
def test_some_blocks_tell_however_many_kinds_of_batch_take_turns(kinds: int) -> None:
    """A block is a number of turns: with one batch of each kind, all would end where they began."""

    class Kinds(Gelu):
        variety = kinds

    arm = Arm()
    arm.setup(Spec(Kinds(size=4), (), "cpu", "float32", 0).pack())
    assert len(arm.batches) % kinds == 0
    assert any(turns * kinds % len(arm.batches) for turns in range(1, 4))
