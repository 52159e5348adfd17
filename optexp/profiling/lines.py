"""Lines of the user's code by the operators that they call, from a trace with a range around each line."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from optexp.profiling.operators import BACKWARD, callers, lines_of, times
from optexp.records.ranges import LineEntry
from optexp.trace import Trace


@dataclass
class _Sums:
    calls: int = 0
    host: float = 0.0
    device: float = 0.0


def lines(trace: Trace) -> list[LineEntry]:
    """One row for each outermost operator and the line that called it, per step, those with most time first.

    Backward functions count for the line of their forward operator. Operators that no marked line called are left out.
    """
    if not trace.lines:
        return []
    found = times(trace)
    places = lines_of(trace, found.backward)
    sums = defaultdict[tuple[str, str], _Sums](_Sums)
    for index, op in enumerate(trace.ops):
        if op.parent >= 0 or op.name.startswith(BACKWARD) or not (line := places[index]):
            continue
        row = sums[op.name, line]
        row.calls += 1
        row.host += op.duration
        row.device += found.device[index]
    for function, operator in found.backward.items():
        outer = next((at for at in reversed([*callers(trace, operator)])), operator)
        if line := places[outer]:
            row = sums[trace.ops[outer].name, line]
            row.host += trace.ops[function].duration
            row.device += found.device[function]
    outermost = [index for index, op in enumerate(trace.ops) if op.parent < 0]
    host = sum(trace.ops[index].duration for index in outermost)
    device = sum(found.device[index] for index in outermost)
    steps, rows = len(trace.steps), []
    for (name, line), row in sums.items():
        rows.append(
            LineEntry(
                operator=name,
                place=line,
                calls=row.calls / steps,
                host_share=row.host / host if host else 0.0,
                device_share=row.device / device if device else 0.0,
                host_us=row.host / steps,
                device_us=row.device / steps,
            )
        )
    return sorted(rows, key=lambda row: (-row.device_share, -row.host_share))


def origins(trace: Trace) -> dict[str, str]:
    """The line with most of an operator's own time, by the operator's name."""
    if not trace.lines:
        return {}
    found = times(trace)
    places = lines_of(trace, found.backward)
    sums: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    on_device = any(found.device_self)
    for index, (op, line) in enumerate(zip(trace.ops, places, strict=True)):
        if line:
            sums[op.name][line] += found.device_self[index] if on_device else op.self_us
    return {name: max(by_line, key=lambda line: by_line[line]) for name, by_line in sums.items()}
