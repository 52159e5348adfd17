"""Whether each step does its own work: a program may compute a whole block of batches at once, or keep results.

A trace tells the work of each step without noise: kernels by the step that launched them, or on a CPU operators. Where
it tells nothing, or was cut short, the time of each step does.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean, median

from optexp.trace import Kernel, Trace

LIGHT = 0.25  # of the mean step's work: a step with less, beside a baseline whose steps are alike, computes nothing


def work(trace: Trace) -> list[float]:
    """By step: µs of the kernels that it launched or, where no kernel was traced, its number of operators."""
    starts, found = [step.start for step in trace.steps], [0.0] * len(trace.steps)
    pieces: Sequence[tuple[float, float]] = list(usual(trace.kernels)) or [(op.start, 1.0) for op in trace.ops]
    for at, amount in pieces:
        if (step := bisect_right(starts, at) - 1) >= 0:
            found[step] += amount
    return found


def usual(kernels: Iterable[Kernel]) -> Iterable[tuple[float, float]]:
    """Start of the launch, and median µs of the kernels of this name and grid: one of them may have had to wait, on a
    card that several programs share."""
    launched = [(kernel.launch.start, (kernel.name, kernel.grid), kernel) for kernel in kernels if kernel.launch]
    durations = defaultdict[tuple[str, tuple[int, ...]], list[float]](list)
    for _, kind, kernel in launched:
        durations[kind].append(kernel.duration)
    return [(start, median(durations[kind])) for start, kind, _ in launched]


def tells(found: Sequence[float], turn: int) -> bool:
    """Whether work was seen, and of every step of one turn of the batches."""
    return any(found) and len(found) >= turn


def lightest(steps: Sequence[float]) -> float:
    """Work of the step that does least, as a share of the mean step's; 1 where none does any."""
    mean = fmean(steps) if steps else 0.0
    return min(steps) / mean if mean else 1.0


def piled_up(baseline: Sequence[float], candidate: Sequence[float]) -> str | None:
    """In words, where a step of the candidate finds its work done by another.

    baseline, candidate: work, or seconds, of each step

    An honest step asks for the same operators each time, so an alarm needs a program one of whose steps does less than
    a quarter of the mean one's work, where the baseline's do not: chance has no part in the number of operators, and
    usual durations of kernels would have to differ fourfold.
    """
    ours, theirs = lightest(candidate), lightest(baseline)
    if ours >= LIGHT * theirs:
        return None
    return (
        f"its lightest step does {ours:.0%} of the work of the mean one, the baseline's {theirs:.0%}: its results were"
        " kept, or one step computes those of several"
    )
