"""Whether the traces behind a profile's tables, each of other steps, show the same program."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

from optexp.profiling.explanation import percent
from optexp.trace import Trace

APART = 0.2  # of the operators' own time: traces that differ by more contradict each other


def disagreement(traces: Iterable[Trace]) -> str:
    """The operator about whose share traces differ most, in words; empty where they agree, and on a GPU.

    The shares are of the host's time, which other programs and the marks of a trace lengthen.
    """
    found = [shares(trace) for trace in traces if not trace.has_gpu]
    by_name = {name: [each.get(name, 0.0) for each in found] for name in dict.fromkeys(chain(*found))}
    ends = {name: (min(of), max(of)) for name, of in by_name.items()}
    name, (low, high) = max(ends.items(), key=lambda end: end[1][1] - end[1][0], default=("", (0.0, 0.0)))
    if high - low <= APART:
        return ""
    return (
        "tables disagree: those of operators, of modules and of lines come from traces of different steps, and"
        f" {name} takes {percent(high)} of the operators' time in one and {percent(low)} in another"
    )


def shares(trace: Trace) -> dict[str, float]:
    """Each operator's own share of the time that the host spends in operators, by name."""
    own = defaultdict[str, float](float)
    for op in trace.ops:
        own[op.name] += op.self_us
    whole = sum(own.values())
    return {name: us / whole for name, us in own.items()} if whole else {}
