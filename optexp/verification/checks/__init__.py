"""Checks after the gates have passed: each file here is one, found by being here, in the order of their names' numbers.

A file defines

    ORDER:                   its place; cheap checks first
    applies(plan, contract)  whether the plan asks for it
    run(trial, on_progress)  add findings to the trial; its messages are methods of `workers.arm_checks`

A check that finds a fault ends the verification: the later ones are not run.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from importlib import import_module
from typing import Protocol, cast

from optexp.strategy import Contract
from optexp.verification.trial import Plan, Trial

Progress = Callable[[str], None]


class Check(Protocol):
    """The module of one check."""

    ORDER: int

    def applies(self, plan: Plan, contract: Contract) -> bool: ...

    def run(self, trial: Trial, on_progress: Progress) -> None: ...


def checks() -> list[Check]:
    """Every check of this folder, in order."""
    found = [import_module(f"{__name__}.{module.name}") for module in pkgutil.iter_modules(__path__)]
    return sorted((cast(Check, module) for module in found), key=lambda check: check.ORDER)
