"""Whether the traces behind a profile's tables show the same program; each trace has other steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from itertools import chain

from optexp.profiling.explanation import percent
from optexp.trace import Trace

APART = 0.2  # of the operators' own time: traces whose shares differ by more contradict each other


def disagreement(traces: Iterable[Trace]) -> str:
    """A sentence on the operator whose share differs most between traces; empty where they agree, and on a GPU.

    Shares are of host time, which other programs and the marks of a trace lengthen.
    """
    tables = [shares(trace) for trace in traces if not trace.has_gpu]
    by_name = {name: [table.get(name, 0.0) for table in tables] for name in dict.fromkeys(chain(*tables))}
    ends = {name: (min(of_traces), max(of_traces)) for name, of_traces in by_name.items()}
    name, (low, high) = max(ends.items(), key=lambda end: end[1][1] - end[1][0], default=("", (0.0, 0.0)))
    if high - low <= APART:
        return ""
    return (
        "tables disagree: those of operators, of modules and of lines come from traces of different steps, and"
        f" {name} takes {percent(high)} of the operators' time in one and {percent(low)} in another"
    )


def shares(trace: Trace) -> dict[str, float]:
    """Each operator's own time as a share of the host's time in all operators, by name."""
    own = defaultdict[str, float](float)
    for op in trace.ops:
        own[op.name] += op.self_us
    whole = sum(own.values())
    return {name: us / whole for name, us in own.items()} if whole else {}
