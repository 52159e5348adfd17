"""Checks after the gates are found by their files, and none runs after a fault."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace

import pytest

from optexp.equivalence.input_families import NORMAL
from optexp.records.verification import broken
from optexp.strategy import REASSOCIATES, precision
from optexp.verification import verify as verification
from optexp.verification.checks import checks, loss_trajectory, other_parameters
from optexp.verification.trial import Plan, Trial
from optexp.workloads.mlp import Mlp

PLAN = Plan(seeds=[1], follow=True)


def test_each_file_is_a_check_in_its_order() -> None:
    assert checks() == [other_parameters, loss_trajectory]


@pytest.mark.parametrize(
    ("check", "plan", "dtype", "asked"),
    [
        (other_parameters, PLAN, None, True),
        (other_parameters, PLAN, "float16", False),
        (other_parameters, Plan([1], power=False), None, False),
        (loss_trajectory, PLAN, "float16", True),
        (loss_trajectory, Plan([1]), None, False),
    ],
)
def test_a_plan_asks_for_a_check(check: ModuleType, plan: Plan, dtype: str | None, asked: bool) -> None:
    assert check.applies(plan, precision(dtype) if dtype else REASSOCIATES) is asked


@pytest.mark.parametrize("fault", [False, True])
def test_a_fault_ends_the_checks(fault: bool, check, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def run(name: str, trial: Trial) -> None:
        ran.append(name)
        if fault and name == "first":
            trial.add([broken("output", "wrong")], 1, 0, NORMAL)

    made = [
        SimpleNamespace(ORDER=i, applies=lambda *_: True, run=lambda trial, _, name=name: run(name, trial))
        for i, name in enumerate(("first", "second"))
    ]
    monkeypatch.setattr(verification, "checks", lambda: made)
    found = check(Mlp(mode="forward", batch_size=4, dim=8, layers=1))
    assert ran == (["first"] if fault else ["first", "second"])
    assert found.ok is not fault
