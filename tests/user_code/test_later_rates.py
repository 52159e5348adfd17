"""Schedules are compared by what they will make of a rate, without a step of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    MultiStepLR,
    OneCycleLR,
    SequentialLR,
)

from optexp.equivalence.schedules import STEPS, TOGETHER
from optexp.user_code.later_rates import later_rates

ALL = 2 * STEPS // TOGETHER


def made(of: Callable[[Optimizer], LRScheduler], **options: Any) -> LRScheduler:
    return of(SGD([torch.zeros(2)], lr=0.1, momentum=0.9, **options))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (lambda o: MultiStepLR(o, [1000]), lambda o: MultiStepLR(o, [1001])),
        (
            lambda o: LambdaLR(o, lambda step: 0.5 ** (step > 700)),
            lambda o: LambdaLR(o, lambda step: 0.5 ** (step > 701)),
        ),
        (lambda o: CosineAnnealingLR(o, 2000), lambda o: CosineAnnealingLR(o, 2001)),
        (
            lambda o: SequentialLR(o, [LinearLR(o, total_iters=9), MultiStepLR(o, [3000])], [9]),
            lambda o: SequentialLR(o, [LinearLR(o, total_iters=9), MultiStepLR(o, [3002])], [9]),
        ),
        (lambda o: OneCycleLR(o, 0.1, total_steps=300), lambda o: OneCycleLR(o, 0.1, total_steps=301)),
    ],
)
def test_what_differs_late_shows(one: Any, other: Any) -> None:
    assert later_rates(made(one)) == later_rates(made(one))
    assert later_rates(made(one)) != later_rates(made(other))


def test_schedule_optimizer_and_generator_stay_as_they_were() -> None:
    schedule = made(lambda o: SequentialLR(o, [LinearLR(o), MultiStepLR(o, [9])], [5]))
    groups = [{**group, "params": []} for group in schedule.optimizer.param_groups]
    state, generator = str(schedule.state_dict()), torch.get_rng_state()
    assert len(later_rates(schedule)) == ALL
    assert str(schedule.state_dict()) == state
    assert [{**group, "params": []} for group in schedule.optimizer.param_groups] == groups
    assert torch.equal(torch.get_rng_state(), generator)


def test_rates_in_tensors_are_as_coarse_as_these() -> None:
    found = later_rates(MultiStepLR(Adam([torch.zeros(2)], lr=torch.tensor(0.1)), [9]))
    assert len(found) == ALL
    assert all(isinstance(rate, torch.Tensor) and rate.dtype is torch.float32 for rate in found)


def test_a_class_of_the_users_own_makes_no_steps() -> None:
    class Loud(LambdaLR):
        def step(self, epoch: int | None = None) -> None:
            if self.last_epoch >= 0:
                raise AssertionError
            super().step(epoch)

    assert later_rates(made(lambda o: Loud(o, lambda step: 1.0))) == []


def test_a_schedule_that_fails_is_known_as_far_as_it_goes() -> None:
    assert later_rates(made(lambda o: LambdaLR(o, lambda step: [1.0, 0.5, 0.25][step]))) == pytest.approx(
        [0.0375, 0.0375]
    )
