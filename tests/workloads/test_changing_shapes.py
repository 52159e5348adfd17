"""Sequences of changing length: the same lengths from the same seed, and more than one of them."""

import pytest
import torch

from optexp.strategies.cuda_graph import CudaGraph
from optexp.workers.arm import Arm
from optexp.workers.spec import Spec
from optexp.workloads.changing_shapes import ChangingShapes


def lengths(seed: int) -> list[int]:
    workload = ChangingShapes(dim=2, batch_size=3, shortest=2, longest=9)
    generator = torch.Generator().manual_seed(seed)
    batches = [workload.batch(generator) for _ in range(8)]
    assert all(x.shape == target.shape and x.shape[0] == 3 for x, target in batches)
    return [x.shape[1] for x, _ in batches]


def test_lengths_change_within_bounds_and_repeat_with_the_seed():
    assert len(set(lengths(0))) > 2
    assert all(2 <= length <= 9 for length in lengths(0))
    assert lengths(0) == lengths(0)
    assert lengths(0) != lengths(1)


def test_lengths_take_turns_so_that_a_block_can_meet_each_equally_often():
    workload = ChangingShapes(dim=2, batch_size=3, shortest=2, longest=900)
    found = [x.shape[1] for x, _ in workload.batches(torch.Generator().manual_seed(1), 2 * workload.variety)]
    assert found[: workload.variety] == found[workload.variety :]
    assert len(set(found)) == workload.variety > 1
    arm = Arm()
    arm.setup(Spec(workload, [], "cpu", "float32", 0).pack())
    assert len(arm.batches) % workload.variety == 0


@pytest.mark.parametrize("mode", ["forward", "forward_backward", "train"])
def test_every_length_runs(mode: str):
    workload = ChangingShapes(mode=mode, dim=4, layers=2, batch_size=2, shortest=1, longest=5)
    program = workload.build(torch.device("cpu"), torch.float32, seed=0)
    generator = torch.Generator().manual_seed(0)
    program.feed.reset([workload.batch(generator) for _ in range(4)])
    for _ in range(4):
        assert all(value.isfinite().all() for value in program.run().values())


@pytest.mark.parametrize(("shortest", "refused"), [(2, True), (9, False)])
def test_a_graph_for_one_shape_is_refused_where_shapes_change(shortest: int, refused: bool):
    workload = ChangingShapes(mode="forward", dim=2, batch_size=1, shortest=shortest, longest=9)
    program = workload.build(torch.device("cpu"), torch.float32, seed=0)
    generator = torch.Generator().manual_seed(0)
    program.feed.reset([workload.batch(generator) for _ in range(4)])
    reason = CudaGraph().unsupported(program, torch.device("cuda"))
    assert ("from batch to batch" in (reason or "")) is refused


def test_bounds_in_the_wrong_order_are_refused():
    with pytest.raises(ValueError, match=r"shortest=5.*longest=4"):
        ChangingShapes(shortest=5, longest=4)
