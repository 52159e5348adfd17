"""A search's first look at the time of a stack, before its verification.

Verification takes most of a trial's time, and a stack that is clearly slower needs none: it is rejected whatever it
computes. A stack that may be faster is verified before it is measured, as in every comparison.
"""

from __future__ import annotations

from optexp.comparison.known_baseline import KnownBaseline
from optexp.workers.arm import Arm
from optexp.workers.client import Client

LEAST = 0.9  # speedup: a first look of a few steps may be wrong by that much
LOOKS = 2  # timings of each arm, which alternate
SHORT_S, MANY, FEW = 0.02, 5, 2  # steps that are shorter are timed in many turns of the batches, others in few


def speedup(bare: Client[Arm], arm: Client[Arm], step_s: float, known: KnownBaseline | None) -> float:
    """The time of a step of the baseline over the stack's, each the shortest of a few.

    Args:
        bare: The bare program, which is the baseline unless one is known.
        step_s: Rough seconds of a step.
        known: A baseline that is a stack itself, and was timed earlier.
    """
    rounds = rounds_of(step_s)
    timed_us = known.profile.trace.timed_us if known else None
    looks = [(mean_s(bare, rounds), mean_s(arm, rounds)) for _ in range(LOOKS)]
    baseline_s = timed_us / 1e6 if timed_us else min(baseline_s for baseline_s, _ in looks)
    return baseline_s / max(min(ours_s for _, ours_s in looks), 1e-9)


def rounds_of(step_s: float) -> int:
    """Turns of the batches in which a step of so many seconds is timed."""
    return MANY if step_s < SHORT_S else FEW


def mean_s(arm: Client[Arm], rounds: int) -> float:
    """Seconds of a step: the mean over the batches of the shortest step on each."""
    steps_s = arm.call(Arm.turn_s, rounds=rounds)
    return sum(steps_s) / len(steps_s)
