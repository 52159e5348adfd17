"""What is held at once follows from the sizes of a batch and its results."""

import pytest
import torch

from optexp.support import memory_plan
from optexp.support.memory_plan import LEAST, PLANS, Sizes, choose, choose_on, thriftier

GIB = 2**30
CARD = 79 * GIB


def plan(batch_gib: float, result_gib: float = 0.0, at_least: int = 0) -> int:
    return choose(Sizes(int(batch_gib * GIB), int(result_gib * GIB)), CARD, at_least)


@pytest.mark.parametrize("gib", [0.0, 0.1, 1.0])
def test_small_batches_change_nothing(gib: float) -> None:
    assert PLANS[plan(gib, gib)] == PLANS[0]


@pytest.mark.parametrize(("gib", "batches"), [(4, 4), (6, 2), (7, 2), (8, 1)])
def test_of_larger_batches_there_are_fewer_and_arms_take_turns(gib: float, batches: int) -> None:
    chosen = PLANS[plan(gib, gib)]
    assert (chosen.batches, chosen.in_turns, chosen.on_host) == (batches, True, False)


def test_results_that_are_small_leave_room_for_more_batches() -> None:
    assert PLANS[plan(8.0)].batches > PLANS[plan(8.0, 8.0)].batches


def test_what_takes_a_third_of_the_card_alone_has_a_plan_with_fp64_on_the_host() -> None:
    assert PLANS[plan(13.0, 13.0)].on_host


@pytest.mark.parametrize(("batch", "result"), [(0.5, 0.5), (2.0, 2.0), (6.0, 6.0), (8.0, 0.0), (1.0, 8.0)])
def test_each_plan_holds_no_more_than_the_one_before(batch: float, result: float) -> None:
    sizes = Sizes(int(batch * GIB), int(result * GIB))
    held = [
        max(sizes.verified_in_turns(p.batches), sizes.timed(p.batches)) if p.in_turns else sizes.side_by_side(p.batches)
        for p in PLANS
    ]
    assert held == sorted(held, reverse=True)


@pytest.mark.parametrize(
    ("batch", "result", "alone", "shared"),
    [
        (0.1, 0.1, "4 distinct batches, arms side by side", "4 distinct batches, arms side by side"),
        (1.0, 2.0, "4 distinct batches, arms side by side", "4 distinct batches, arms in turns"),
        (6.0, 6.0, "2 distinct batches, arms in turns", "2 distinct batches, arms in turns"),  # else fp64 on the host
    ],
)
def test_on_a_shared_card_each_has_its_share(
    batch: float, result: float, alone: str, shared: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_plan, "capacity", lambda device, sharing=1: CARD // sharing)
    sizes = Sizes(int(batch * GIB), int(result * GIB))
    plans = [PLANS[choose_on(torch.device("cuda"), sizes, sharing)].describe() for sharing in (1, 3)]
    assert plans == [alone, shared]


def test_a_plan_that_was_tried_is_not_chosen_again() -> None:
    assert plan(0.1, at_least=3) == 3


def test_after_memory_ran_out_a_single_batch_follows_then_the_host_then_nothing() -> None:
    assert [thriftier(index) for index in range(len(PLANS))] == [LEAST, LEAST, LEAST, LEAST + 1, None]
    assert PLANS[LEAST].batches == 1
    assert PLANS[-1].on_host
