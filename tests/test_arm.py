"""What an arm remembers of the blocks that it timed."""

import torch

from optexp.arm import Arm


def test_the_block_that_is_repeated_ends_on_another_batch_than_the_step_before_it():
    for _ in range(20):
        arm = Arm()
        arm.batches = [(torch.zeros(1),)] * 4
        for steps in (8, 7, 12, 9, 4):
            arm._keep(2, steps, {"output": torch.full((1,), float(steps))})
        assert arm.kept is not None
        assert arm.kept[0] in (9, 11)
        assert arm.kept[1]["output"].item() == arm.kept[0] - 2


def test_a_block_that_does_not_tell_is_better_than_none():
    arm = Arm()
    arm.batches = [(torch.zeros(1),)] * 4
    arm._keep(2, 8, {"output": torch.zeros(1)})
    assert arm.timed_steps() == 10
