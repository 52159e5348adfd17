"""The most that each strategy can gain on a profiled program, before any is tried, and what measuring one said."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import cloudpickle

from optexp.comparison.explained import TWICE
from optexp.comparison.suggestions import goes_with, installed, typed
from optexp.profiling.bounds import Bound
from optexp.profiling.explanation import DISTORTED
from optexp.profiling.view import View
from optexp.records.prediction import ABOVE, MeasuredPrediction, Prediction
from optexp.records.profile import Calibration
from optexp.result import Result
from optexp.strategy import Composed, Contract, Remedy, Strategy, named
from optexp.support.units import ratio
from optexp.workers.arm import Arm
from optexp.workers.client import Client

UNTRUSTED = "no gains are predicted: the trace does not show the step as it is timed"
LeastUs = Callable[[Contract], float]  # physical bound of a step under a promise, in µs; 0 where none is known


def _unknown(contract: Contract) -> float:
    return 0.0


def predicted(
    arm: Client[Arm],
    view: View,
    stack: Sequence[Strategy],
    calibration: Calibration | None,
    step_us: float | None = None,
    least_us: LeastUs = _unknown,
) -> list[Prediction]:
    """A prediction for each strategy that has a bound, and that the stack and its program take; most gain first.

    Args:
        arm: That was profiled; strategies that it does not run may import modules there.
        view: Its profile.
        stack: Its strategies.
        calibration: Ceilings of the device.
        step_us: A step as it was timed; None where only the traced one is known.
        least_us: Physical bound of a step, in µs, under a promise.
    """
    found = {}
    for text, strategy in variants(installed()):
        if strategy.helps(view.trace, calibration) and goes_with(strategy, stack):
            least = least_us(Composed([*stack, strategy]).contract)
            foretold = prediction(text, strategy, view, calibration, step_us, least)
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
    text: str,
    strategy: Strategy,
    view: View,
    calibration: Calibration | None,
    step_us: float | None = None,
    least_us: float = 0.0,
) -> Prediction | None:
    """Of one strategy; None where it knows no bound of this step. For `least_us` see `of_bound`."""
    bound = strategy.bound(view, calibration)
    if bound is None:
        return None
    return of_bound(text, bound, view, step_us or view.breakdown.wall_us, least_us)


def of_bound(text: str, bound: Bound, view: View, step_us: float, least_us: float = 0.0) -> Prediction | None:
    """No shorter than the physical bound `least_us`; None where nothing of the timed step would be left."""
    us, least = timed(bound, view, step_us), min(least_us, step_us)
    if us < least:
        return Prediction(text, least, step_us, f"{bound.text}; by physics no less")
    return Prediction(text, us, step_us, bound.text) if us > 0 else None


def timed(bound: Bound, view: View, step_us: float) -> float:
    """µs of the timed step, of which a bound of the traced one is known.

    Tracing adds time to the host, to some of its work more than to other. So what is saved of the traced step counts in
    full; what is left in any case does not shrink on the device, and on the host as the step does.
    """
    traced_us = view.breakdown.wall_us
    if step_us >= traced_us:
        return bound.us
    shorter = step_us / traced_us
    if bound.device_us is None or step_us <= (view.breakdown.busy or 0.0) * traced_us:
        return bound.us * shorter
    return max(step_us - (traced_us - bound.us), bound.device_us, bound.least_us * shorter)


def of_candidate(
    baseline: Sequence[Strategy],
    candidate: Sequence[Strategy],
    view: View,
    calibration: Calibration | None,
    step_us: float,
    least_us: float = 0.0,
) -> Prediction | None:
    """Of all that a candidate adds to its baseline; None where a part of it has no bound, or it leaves a part out.

    Args:
        view: The baseline's profile.
        step_us: Of the baseline, as it was timed.
        least_us: Physical bound of the candidate's step.
    """
    added = {strategy.label: strategy for strategy in candidate}
    for strategy in baseline:
        if added.pop(strategy.label, None) is None:
            return None
    bounds = [strategy.bound(view, calibration) for strategy in added.values()]
    known = [bound for bound in bounds if bound is not None]
    if not known or len(known) < len(bounds):
        return None
    bound = known[0] if len(known) == 1 else view.parts(calibration).together(known)
    return of_bound("+".join(added), bound, view, step_us, least_us) if bound is not None else None


def set_beside(
    result: Result,
    baseline: Sequence[Strategy],
    candidate: Sequence[Strategy],
    view: View,
    ceilings: Calibration,
    least_us: float = 0.0,
) -> None:
    """Set a prediction from the baseline's profile beside the measured speedup, and note it where that is refuted.

    Nothing is where something disturbed the profile.
    """
    before, after, speedup = result.baseline.step_us, result.candidate.step_us, result.speedup
    if not before or not after or speedup is None:
        return
    if disturbed(view, before):
        return
    found = of_candidate(baseline, candidate, view, ceilings, before, least_us)
    if found is None:
        return
    tested = MeasuredPrediction(found, after, speedup.estimate / found.speedup, speedup.low / found.speedup)
    result.profile.prediction = tested
    if tested.refuted:
        result.notes.append(refutation(tested))


def disturbed(view: View, step_us: float) -> bool:
    """Whether the profiled process took another time before it was traced, or tracing hides what the step does."""
    before_us = view.trace.timed_us or view.breakdown.wall_us
    other = not 1 / TWICE <= before_us / step_us <= TWICE
    return other or (view.breakdown.busy is None and (view.breakdown.stretched or 0.0) > DISTORTED)


def refutation(tested: MeasuredPrediction) -> str:
    """That a measurement is beyond its bound, and what follows."""
    found = tested.prediction
    measured = (
        f"measured {ratio(tested.ratio * found.speedup)}, predicted at most {ratio(found.speedup)} ({found.text})"
    )
    if tested.surely > ABOVE:
        return f"beyond its bound: {measured}: the bound's model or the equivalence check is wrong"
    return (
        f"beyond its bound: {measured}: the bound's model or the equivalence check is wrong, or the measurement is too"
        f" uncertain: its interval begins at {ratio(tested.surely * found.speedup)}"
    )
