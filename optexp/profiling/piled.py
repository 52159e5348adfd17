"""Whether each step does its own work: a program could compute a whole block of batches in one step, or cache results.

A trace shows the work of each step without noise: kernels by the step that launched them, or operators on a CPU. If
the trace shows none, or too few steps, the time of each step replaces it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from optexp.trace import Kernel, Trace

LIGHT = 0.25  # work of the lightest step over the mean, relative to the baseline's, below which a step skips work


def work(trace: Trace) -> list[float]:
    """Work of each step: µs of the kernels that it launched or, without traced kernels, its number of operators."""
    starts, found = [step.start for step in trace.steps], [0.0] * len(trace.steps)
    pieces: Sequence[tuple[float, float]] = list(usual(trace.kernels)) or [(op.start, 1.0) for op in trace.ops]
    for at, amount in pieces:
        if (step := bisect_right(starts, at) - 1) >= 0:
            found[step] += amount
    return found


def usual(kernels: Iterable[Kernel]) -> Iterable[tuple[float, float]]:
    """Start of each kernel's launch, and the median µs of all kernels with its name and grid.

    The median, because a single kernel may have waited on a GPU that several programs share.
    """
    launched = [(kernel.launch.start, (kernel.name, kernel.grid), kernel) for kernel in kernels if kernel.launch]
    durations = defaultdict[tuple[str, tuple[int, ...]], list[float]](list)
    for _, kind, kernel in launched:
        durations[kind].append(kernel.duration)
    medians = {kind: median(taken) for kind, taken in durations.items()}  # once: a recurrent step has 10,000 of a kind
    return [(start, medians[kind]) for start, kind, _ in launched]


def tells(found: Sequence[float], turn: int) -> bool:
    """Whether work was traced for at least one step on each of the `turn` batches."""
    return any(found) and len(found) >= turn


def lightest(steps: Sequence[float]) -> float:
    """Work of the lightest step over the mean; 1 where no step does any work."""
    mean = fmean(steps) if steps else 0.0
    return min(steps) / mean if mean else 1.0


def piled_up(baseline: Sequence[float], candidate: Sequence[float]) -> str | None:
    """A sentence if a step of the candidate does much less work than its mean step; else None.

    An honest program has the same operators in each step, and the median durations of its kernels do not vary
    fourfold, so chance raises no alarm.

    baseline, candidate: work, or seconds, of each step
    """
    ours, theirs = lightest(candidate), lightest(baseline)
    if ours >= LIGHT * theirs:
        return None
    return (
        f"its lightest step does {ours:.0%} of the work of the mean one, the baseline's {theirs:.0%}: its results were"
        " kept, or one step computes those of several"
    )
