"""The most that each strategy can gain on a profiled program, before any is tried, and what measuring one said."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import cloudpickle

from optexp.comparison.suggestions import goes_with, installed, typed
from optexp.profiling.view import View
from optexp.records.prediction import Prediction
from optexp.records.profile import Calibration
from optexp.strategy import Remedy, Strategy, named
from optexp.workers.arm import Arm
from optexp.workers.client import Client


def predicted(
    arm: Client[Arm],
    view: View,
    stack: Sequence[Strategy],
    calibration: Calibration | None,
    step_us: float | None = None,
) -> list[Prediction]:
    """A prediction for each strategy that has a bound, and that the stack and its program take; most gain first.

    Args:
        arm: That was profiled; strategies that it does not run may import modules there.
        view: Its profile.
        stack: Its strategies.
        calibration: Ceilings of the device.
        step_us: A step as it was timed; None where only the traced one is known.
    """
    found = {}
    for text, strategy in variants(installed()):
        if strategy.helps(view.trace, calibration) and goes_with(strategy, stack):
            foretold = prediction(text, strategy, view, calibration, step_us)
            if foretold is not None:
                found[text] = strategy, foretold
    strategies = [strategy for strategy, _ in found.values()]
    refused = arm.call(Arm.refusals, packed=cloudpickle.dumps(strategies)) if strategies else []
    taken = [p for (_, p), reason in zip(found.values(), refused, strict=True) if not reason]
    return sorted(taken, key=lambda p: (-p.speedup, p.strategy))


def variants(strategies: Sequence[Strategy]) -> Iterator[tuple[str, Strategy]]:
    """Each strategy as it is, and with the options of each remedy, by how it is typed."""
    for strategy in strategies:
        plain = Remedy("")
        for remedy in (plain, *strategy.remedies):
            if remedy is plain or remedy.options:
                yield typed(strategy, remedy), replace_options(strategy, remedy)


def replace_options(strategy: Strategy, remedy: Remedy) -> Strategy:
    """The strategy with a remedy's options, under its own name."""
    return named(replace(strategy, **remedy.options), strategy.name)


def prediction(
    text: str, strategy: Strategy, view: View, calibration: Calibration | None, step_us: float | None = None
) -> Prediction | None:
    """Of one strategy; None where it knows no bound."""
    bound = strategy.bound(view, calibration)
    if bound is None:
        return None
    whole = step_us or view.breakdown.wall_us
    return Prediction(text, timed(bound.us, view, step_us), whole, bound.text)


def timed(us: float, view: View, step_us: float | None) -> float:
    """A bound of the traced step as one of the timed step: shorter where that is shorter, as tracing adds time."""
    return us * min(step_us / view.breakdown.wall_us, 1.0) if step_us else us
