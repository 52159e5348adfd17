"""Whether the work of several steps is done in one of them: a program that computes a whole block of batches at once.

What a step asks for is told by its trace, without noise: kernels by the step that launched them, or on a CPU operators.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from statistics import fmean, median_low

from optexp.trace import Trace

LIGHT = 0.25  # of the mean step's work: a typical step with less, beside a baseline whose steps are alike, is one


def work(trace: Trace) -> list[float]:
    """By step: µs of the kernels that it launched or, where no kernel was traced, its number of operators."""
    starts, found = [step.start for step in trace.steps], [0.0] * len(trace.steps)
    pieces: Sequence[tuple[float, float]] = [(k.launch.start, k.duration) for k in trace.kernels if k.launch]
    for at, amount in pieces or [(op.start, 1.0) for op in trace.ops]:
        if (step := bisect_right(starts, at) - 1) >= 0:
            found[step] += amount
    return found


def typical(trace: Trace) -> float:
    """Work of the median step, as a share of the mean step's; 1 where a trace shows no work.

    The lower of two medians: of two steps, one of which does the work of both, that is the other.
    """
    steps = work(trace)
    mean = fmean(steps)
    return median_low(steps) / mean if mean else 1.0


def piled_up(baseline: Trace, candidate: Trace) -> str | None:
    """In words, where the work of most steps of the candidate is done in a few of them.

    An honest step asks for the same operators each time, so an alarm needs a program whose typical step does less than
    a quarter of the mean one, where the baseline's does not: chance has no part in the number of operators, and
    durations of kernels would have to differ fourfold.
    """
    ours, theirs = typical(candidate), typical(baseline)
    if ours >= LIGHT * min(theirs, 1.0):
        return None
    return (
        f"a typical step does {ours:.0%} of the work of the mean one, the baseline's {theirs:.0%}: one step computes"
        " the results of several"
    )
