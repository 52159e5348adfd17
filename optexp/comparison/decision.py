"""The decision that a search comes to, in one sentence with its costs."""

from __future__ import annotations

from dataclasses import dataclass

from optexp.comparison.goal import FIGURE, Goal
from optexp.comparison.trials import figures
from optexp.records.measurement import Cost
from optexp.result import Result, Verdict
from optexp.strategy import Contract
from optexp.support.units import at_least, duration, joules, mebibytes, ratio


@dataclass(frozen=True)
class Choice:
    """use: the winner, instead of the baseline;  text: one sentence"""

    use: bool
    text: str


def decide(result: Result, verdict: Verdict, goal: Goal, promise: Contract, kept: bool) -> Choice:
    """The advice of a search with its reason and its costs.

    Args:
        result: With the winner's last measurement, if there was a winner.
        verdict: Of the job.
        promise: The winner's.
        kept: The search kept something.
    """
    against = str(result.config.get("baseline") or "baseline")
    stay = "Keep the baseline" if against == "baseline" else f"Keep {against}"
    if not kept:
        return Choice(False, f"{stay}: {_none(result, goal)}{_unmet(result, goal)}.")
    if not result.measurement and verdict is Verdict.INCONCLUSIVE:
        return Choice(False, f"{result.label} is the best so far, and was not measured anew: the budget was spent.")
    if reason := _lost(result, verdict, goal):
        return Choice(
            False, f"{stay}: the search kept {result.label}, and measured anew {reason}{_unmet(result, goal)}."
        )
    costs = [cost for cost in (_setup(result, verdict), _memory(result), _precision(promise)) if cost]
    gain = f"{_gain(result, verdict, goal, against)}{_unmet(result, goal)}"
    return Choice(True, f"Use {result.label}: {gain}; it costs {_all(costs)}.")


def _none(result: Result, goal: Goal) -> str:
    """Why nothing was kept."""
    tried = len({trial.change for trial in result.trials})
    if not tried:
        return "no change could be tried"
    words = "is shown to be faster" if goal.objective == "time" else f"takes less {FIGURE[goal.objective]}"
    return f"none of {tried} changes that were tried {words}" if tried > 1 else f"no change {words}, of the one tried"


def _lost(result: Result, verdict: Verdict, goal: Goal) -> str:
    """Why the winner is none when measured anew; empty where it is one."""
    if not verdict.measured or result.speedup is None:
        return f"it ends {verdict}"  # whose reason is the headline
    before, after = goal.figure(figures(result.baseline)), goal.figure(figures(result.candidate))
    if _fits_at_last(result, goal):
        return ""
    if goal.objective == "time":
        return "" if verdict is Verdict.FASTER else f"it ends {verdict}"
    if not before or not after or before / after < 1 + goal.min_gain:
        return f"its {FIGURE[goal.objective]} is not less"
    if result.speedup.estimate * goal.max_slowdown < 1:
        return f"a step takes {ratio(1 / result.speedup.estimate)} the baseline's time"
    return ""


def _fits_at_last(result: Result, goal: Goal) -> bool:
    """True if the baseline exceeds the memory limit and the winner's peak memory is lower."""
    limit, before, after = goal.memory_limit_mib, result.baseline.peak_mib, result.candidate.peak_mib
    return limit is not None and before is not None and after is not None and after < before and before > limit


def _gain(result: Result, verdict: Verdict, goal: Goal, against: str) -> str:
    speedup, than = result.speedup, "the baseline" if against == "baseline" else against
    assert speedup is not None
    speed = f"at least {at_least(speedup.low)}× faster than {than} (best estimate {ratio(speedup.estimate)})"
    speed = speed if verdict is Verdict.FASTER else f"speed {verdict} ({ratio(speedup.estimate)})"
    before, after = goal.figure(figures(result.baseline)), goal.figure(figures(result.candidate))
    if goal.objective == "time" or not before or not after:
        return speed
    unit = mebibytes if goal.objective == "memory" else joules
    return f"{FIGURE[goal.objective]} {unit(after)} instead of {unit(before)}, {speed}"


def _unmet(result: Result, goal: Goal) -> str:
    """The memory limit, where nothing that was kept meets it."""
    arm = result.candidate if result.candidate.peak_mib is not None else result.baseline
    if goal.memory_limit_mib is None or arm.peak_mib is None or arm.peak_mib <= goal.memory_limit_mib:
        return ""
    peak, limit = mebibytes(arm.peak_mib), mebibytes(goal.memory_limit_mib)
    return f"; its peak memory of {peak} is over the limit of {limit}, and nothing that was tried meets it"


def _setup(result: Result, verdict: Verdict) -> str:
    cost = result.measurement.cost if result.measurement else Cost()
    if cost.setup_s is None or cost.baseline_setup_s is None or cost.setup_s <= cost.baseline_setup_s:
        return ""
    steps = cost.break_even_steps
    paid = f", paid back after {steps:,} steps" if verdict is Verdict.FASTER and isinstance(steps, int) else ""
    return f"{duration(cost.setup_s - cost.baseline_setup_s)} more set-up{paid}"


def _memory(result: Result) -> str:
    before, after = result.baseline.peak_mib, result.candidate.peak_mib
    if not before or not after or after <= 1.005 * before:
        return ""
    return f"{ratio(after / before)} the peak memory ({mebibytes(after)})"


def _precision(promise: Contract) -> str:
    return f"{promise.dtype} precision" if promise.dtype else ""


def _all(costs: list[str]) -> str:
    return "nothing in set-up, memory or precision" if not costs else ", ".join(costs)
