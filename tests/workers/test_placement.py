"""Tensors of a step move to other places of a card's memory between blocks, and compute the same there."""

from __future__ import annotations

import gc
from random import Random
from typing import Any

import pytest
import torch

from optexp.measurement.settings import MeasurementSettings
from optexp.measurement.statistics import over_one_process, over_processes
from optexp.program import tensors_of
from optexp.records.measurement import ProcessSpread
from optexp.support import card_memory
from optexp.support.card_memory import shifts
from optexp.workers import arm_placement
from optexp.workers.arm import Arm
from optexp.workers.arm_placement import Placement, copies
from optexp.workers.spec import Spec
from optexp.workloads.gelu import Gelu

CPU = torch.device("cpu")


def held(arm: Arm) -> list[torch.Tensor]:
    return [tensor for batch in arm.batches for tensor in tensors_of(batch).values()]


@pytest.fixture
def arm() -> Arm:
    found = Arm()
    found.setup(Spec(Gelu(size=64), (), "cpu", "float32", 0).pack())
    found.restore()
    return found


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that no cache holds."""
    monkeypatch.setattr(Placement, "_bytes", lambda _: 1)
    monkeypatch.setattr(card_memory, "LARGEST", 2**22)


def test_nothing_moves_where_it_makes_no_difference(arm: Arm) -> None:
    before = held(arm)
    assert not arm.relocate()
    assert all(one is other for one, other in zip(before, held(arm), strict=True))


@pytest.mark.usefixtures("large")
def test_the_same_batches_lie_elsewhere(arm: Arm) -> None:
    before = held(arm)
    assert arm.relocate()
    after = held(arm)
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert not {one.data_ptr() for one in before} & {other.data_ptr() for other in after}
    assert arm.shifts
    assert arm.block(3, 1).steps == 3
    assert arm.delivered()[0]


X = torch.rand(4, 6)


@pytest.mark.parametrize(
    ("tensor", "copied"),
    [
        (X, True),
        (X.mT, True),
        (torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last), True),
        (torch.arange(3), True),
        (X[:, :3], False),
        (X[:1].expand(4, 6), False),
        (X.clone().requires_grad_(), False),
        (torch.eye(3).to_sparse(), False),
        (torch.nn.Parameter(X, requires_grad=False), False),
    ],
)
def test_a_copy_has_the_layout_of_its_tensor(tensor: torch.Tensor, copied: bool) -> None:
    made = copies([(tensor,)])
    assert bool(made) is copied
    for batch in made:
        (copy,) = tensors_of(batch).values()
        assert torch.equal(copy, tensor)
        assert copy.stride() == tensor.stride()
        assert copy.data_ptr() != tensor.data_ptr()


@pytest.mark.usefixtures("large")
def test_a_process_whose_batches_take_long_to_draw_stays_where_it_is(arm: Arm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_placement, "LONGEST_S", 0.0)
    assert [arm.relocate(), arm.relocate()] == [True, False]


def test_shifts_are_of_random_sizes() -> None:
    sizes = {sum(block.nbytes for block in shifts(CPU, Random(seed))) for seed in range(4)}
    assert len(sizes) == 4


PLACES = (0.0, 0.065)  # log of a step's time in either place, of equal programs
SPREAD = ProcessSpread(0.002, 8, "")


def log_ratios(random: Random, moving: int, pairs: int = 20) -> list[float]:
    """Of one process of each arm, of which so many move."""
    stays = [random.choice(PLACES) for _ in range(2 - moving)]
    places = [[*stays, *(random.choice(PLACES) for _ in range(moving))] for _ in range(pairs)]
    return [one - other + random.gauss(0.0, 0.002) for one, other in places]


@pytest.mark.parametrize(("moving", "least", "most"), [(2, 0.0, 0.01), (1, 0.0, 0.01), (0, 0.3, 1.0)])
def test_one_process_in_many_places_calls_no_equal_programs_different(moving: int, least: float, most: float) -> None:
    random = Random(0)
    intervals = [over_one_process(log_ratios(random, moving), 0.99, SPREAD) for _ in range(400)]
    wrong = sum(not found.low <= 0.01 or not found.high >= -0.01 for found in intervals) / len(intervals)
    assert least <= wrong <= most


def test_processes_in_many_places_agree() -> None:
    random = Random(0)
    widths = {
        moving: over_processes([sorted(log_ratios(random, moving))[10] for _ in range(5)], 0.99).half_width
        for moving in (2, 0)
    }
    assert widths[2] < widths[0]


def test_arms_move_before_each_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    from optexp.comparison.sampling import sample
    from optexp.workers.client import InProcess

    calls = list[str]()

    def arm(name: str, moves: int) -> Any:
        found = Arm()
        found.setup(Spec(Gelu(size=8), (), "cpu", "float32", 0).pack())
        left = iter([True] * moves)

        def relocate() -> bool:
            calls.append(name)
            return next(left, False)

        found.relocate = relocate  # type: ignore[method-assign]
        return InProcess(found, name)

    arms = {"baseline": arm("baseline", 9), "candidate": arm("candidate", 1)}
    sample(arms, MeasurementSettings(block_ms=1.0, warmup_s=0.01, process_s=0.0, pairs=10), Random(0), 10)
    assert calls == ["baseline", "candidate"] * 2 + ["baseline"] * 8


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "moves"), [(256, False), (8192, True)])
def test_on_a_card_tensors_larger_than_its_cache_move(size: int, moves: bool) -> None:
    gc.collect()  # memory of earlier tests in this process counts
    torch.cuda.empty_cache()
    arm = Arm()
    arm.setup(Spec(Gelu(size=size), (), "cuda", "float32", 0).pack())
    arm.restore()
    before = held(arm)
    assert arm.relocate() is moves
    assert all(torch.equal(one, other) for one, other in zip(before, held(arm), strict=True))
    assert bool({one.data_ptr() for one in before} & {other.data_ptr() for other in held(arm)}) is not moves
