"""Phases of a step and regions that a user marked: their host and device time, and a trace of one region alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from optexp.errors import ConfigError
from optexp.profiling.intervals import Interval, Union
from optexp.profiling.operators import BACKWARD, backward_of, callers, gpu_work
from optexp.records.profile import ModuleEntry
from optexp.records.ranges import RangeEntry
from optexp.support.ranges import PHASE, REGION
from optexp.trace import LAUNCH, Call, Copy, Kernel, Op, Range, Span, Trace

REST = "rest"
W = TypeVar("W", Kernel, Copy)


# --- tables ------------------------------------------------------------------------------------------------------


def phases(trace: Trace) -> list[RangeEntry]:
    """One row for each phase of the step, in their order, and one for the rest; empty where no phase was marked.

    Launches of other threads during a phase count, as the host waits inside the phase for autograd's thread.
    """
    marks = named(trace, PHASE)
    if not marks:
        return []
    rows = [_entry(trace, name, Part(trace, ranges, every_thread=True), {}) for name, ranges in marks.items()]
    inside = Union(mark.interval for ranges in marks.values() for mark in ranges)
    host = sum(step.duration - inside.within(*step.interval) for step in trace.steps)
    loose = [work for work in gpu_work(trace) if work.launch is None or not inside.holds(work.launch.start)]
    rest = _row(trace, REST, len(trace.steps), host, loose)
    return [*rows, rest]


def regions(trace: Trace) -> list[RangeEntry]:
    """One row for each region that the user marked, in the order of their first calls."""
    backward = backward_of(trace)
    return [_entry(trace, name, Part(trace, ranges), backward) for name, ranges in named(trace, REGION).items()]


def named(trace: Trace, prefix: str) -> dict[str, list[Range]]:
    """Ranges whose name begins with `prefix`, by the rest of their name."""
    found = defaultdict[str, list[Range]](list)
    for mark in sorted(trace.annotations, key=lambda mark: mark.start):
        if mark.name.startswith(prefix):
            found[mark.name.removeprefix(prefix)].append(mark)
    return dict(found)


def _entry(trace: Trace, name: str, part: Part, backward: dict[int, int]) -> RangeEntry:
    functions = part.functions(backward)
    later = {id(work) for work in part.backward_work(functions)}
    forward = [work for work in gpu_work(trace) if part.launched(work)]
    after = [work for work in gpu_work(trace) if id(work) in later and not part.launched(work)]
    outside = [trace.ops[index] for index in functions if not part.holds(trace.ops[index])]
    host = sum(union.total for union in part.by_thread.values())
    return _row(trace, name, part.calls, host, forward, sum(op.duration for op in outside), after)


def _row(
    trace: Trace,
    name: str,
    calls: int,
    host: float,
    work: Sequence[Kernel | Copy],
    backward_host: float = 0.0,
    backward_work: Sequence[Kernel | Copy] = (),
) -> RangeEntry:
    steps, whole = len(trace.steps), sum(kernel.duration for kernel in gpu_work(trace))
    device, backward_device = (sum(kernel.duration for kernel in kernels) for kernels in (work, backward_work))
    return RangeEntry(
        name=name,
        calls=calls / steps,
        host_share=(host + backward_host) / sum(step.duration for step in trace.steps),
        device_share=(device + backward_device) / whole if whole else 0.0,
        kernels=(len(work) + len(backward_work)) / steps,
        host_us=host / steps,
        device_us=device / steps,
        backward_host_us=backward_host / steps,
        backward_device_us=backward_device / steps,
    )


@dataclass(frozen=True)
class Part:
    """The part of a trace inside ranges of one name. Nested ranges of that name count once."""

    trace: Trace
    ranges: Sequence[Range]
    every_thread: bool = False

    @cached_property
    def by_thread(self) -> dict[object, Union]:
        """Time inside the ranges, by thread."""
        threads = {mark.thread for mark in self.ranges}
        return {thread: Union(m.interval for m in self.ranges if m.thread == thread) for thread in threads}

    @cached_property
    def anywhere(self) -> Union:
        return Union(mark.interval for mark in self.ranges)

    @cached_property
    def calls(self) -> int:
        """Number of ranges that lie in no other range of the part."""
        ends, count = dict[object, float](), 0
        for mark in sorted(self.ranges, key=lambda mark: (mark.start, -mark.duration)):
            if mark.end > ends.get(mark.thread, float("-inf")):
                ends[mark.thread] = mark.end
                count += 1
        return count

    @cached_property
    def _places(self) -> dict[object, int]:
        return {op.id: index for index, op in enumerate(self.trace.ops) if op.id is not None}

    def place(self, work: Kernel | Copy) -> int | None:
        """Index of the operator that launched a kernel or copy; None where unknown."""
        return self._places.get(work.op.id) if work.op is not None else None

    def holds(self, event: Op | Call) -> bool:
        """Whether an event of the host began inside a range of its own thread (of any, with `every_thread`)."""
        if self.every_thread:
            return self.anywhere.holds(event.start)
        return event.thread in self.by_thread and self.by_thread[event.thread].holds(event.start)

    def launched(self, work: Kernel | Copy) -> bool:
        """Whether a launch came from inside: by the range's thread, or by autograd's while that thread waits for it."""
        if work.launch is None:
            return False
        if self.holds(work.launch):
            return True
        return self.anywhere.holds(work.launch.start) and self._by_autograd(self.place(work))

    def _by_autograd(self, index: int | None) -> bool:
        if index is None:
            return False
        return any(self.trace.ops[at].name.startswith(BACKWARD) for at in (index, *callers(self.trace, index)))

    def functions(self, backward: dict[int, int]) -> set[int]:
        """Indices of the backward functions of operators inside."""
        return {function for function, operator in backward.items() if self.holds(self.trace.ops[operator])}

    def backward_work(self, functions: set[int]) -> list[Kernel | Copy]:
        """Kernels and copies of these backward functions."""
        found = []
        for work in gpu_work(self.trace) if functions else ():
            index = self.place(work)
            if index is not None and not functions.isdisjoint((index, *callers(self.trace, index))):
                found.append(work)
        return found


def shares_of_region(modules: Sequence[ModuleEntry], trace: Trace, name: str) -> list[ModuleEntry]:
    """Modules with their shares of a region's time, in both passes.

    Args:
        modules: Modules of the region alone, from this trace.
        trace: Trace of the region, with a range around each module's call.
        name: Of the region.
    """
    region = next(entry for entry in regions(trace) if entry.name == name)

    def cost(row: ModuleEntry | RangeEntry) -> float:
        host = (row.host_us or 0.0) + (row.backward_host_us or 0.0)
        return (row.device_us or 0.0) + (row.backward_device_us or 0.0) if region.device_us else host

    whole = cost(region)
    return [replace(row, share=cost(row) / whole if whole else 0.0) for row in modules]


# --- one region alone --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Excerpt:
    """One region of a trace.

    tables: the region's operators, calls, kernels and copies at their original times, for tables
    alone:  the region on a time axis of its own, without the gaps in which other code worked, for the breakdown
    """

    tables: Trace
    alone: Trace


def excerpt(trace: Trace, name: str) -> Excerpt:
    """The region of this name, with the backward functions of its operators.

    On a GPU its time consists of its kernels and copies and of the gaps before, between and after them. It starts when
    the host is inside the region and the device has finished all earlier launches.

    Raises:
        ConfigError: The traced steps never entered the region.
    """
    found = named(trace, REGION)
    if name not in found:
        known = f"they entered {', '.join(found)}" if found else "they entered none"
        raise ConfigError(
            f"profile.region={name}: the traced steps never entered this region ({known}): mark it with"
            f' `with optexp.region("{name}"):`; compiled code marks nothing'
        )
    part = Part(trace, found[name])
    functions = part.functions(backward_of(trace))
    return Excerpt(_kept(part, functions), _alone(part, functions))


def _kept(part: Part, functions: set[int]) -> Trace:
    """The trace without events outside the region; steps do not change."""
    trace, inside = part.trace, _operators(part, functions)
    place = {index: at for at, index in enumerate(inside)}
    work = {id(launched) for launched in _work(part, functions)}
    pieces = _pieces(part, functions)
    return replace(
        trace,
        ops=tuple(replace(trace.ops[i], parent=place.get(trace.ops[i].parent, -1)) for i in inside),
        kernels=tuple(kernel for kernel in trace.kernels if id(kernel) in work),
        copies=tuple(copy for copy in trace.copies if id(copy) in work),
        api=tuple(call for call in trace.api if _in(pieces, call)),
        modules=tuple(call for call in trace.modules if _in(pieces, call)),
        annotations=tuple(mark for mark in trace.annotations if _in(pieces, mark)),
        memory=(),
    )


def _alone(part: Part, functions: set[int]) -> Trace:
    trace, kept = part.trace, _kept(part, functions)
    pieces = _pieces(part, functions)
    hosts = sorted(interval for union in pieces.values() for interval in union)
    time = Union(_windows(trace, kept, hosts)) if trace.has_gpu else Union(hosts)
    axis = _Axis(time)
    calls = [c for c in trace.api if _in(pieces, c) or (not LAUNCH.match(c.name) and time.within(*c.interval))]
    launches = {id(call): replace(call, start=axis(call.start), duration=axis.length(call)) for call in trace.api}
    loading = [mark for mark in trace.annotations if time.within(*mark.interval)]
    return replace(
        kept,
        steps=tuple(replace(step, start=axis(step.start), duration=axis.length(step)) for step in trace.steps),
        ops=tuple(replace(op, start=axis(op.start)) for op in kept.ops),
        kernels=tuple(_moved(kernel, axis, launches) for kernel in kept.kernels),
        copies=tuple(_moved(copy, axis, launches) for copy in kept.copies),
        api=tuple(launches[id(call)] for call in calls),
        annotations=tuple(replace(m, start=axis(m.start), duration=axis.length(m)) for m in loading),
        timed_us=None,
    )


def _moved(work: W, axis: _Axis, launches: dict[int, Call]) -> W:
    launch = None if work.launch is None else launches[id(work.launch)]
    return replace(work, start=axis(work.start), launch=launch)


class _Axis:
    """Maps moments to an axis on which the given intervals follow each other without gaps."""

    def __init__(self, time: Union) -> None:
        self.time = time

    def __call__(self, moment: float) -> float:
        return self.time.within(float("-inf"), moment)

    def length(self, span: Span) -> float:
        return self.time.within(*span.interval)


def _operators(part: Part, functions: set[int]) -> list[int]:
    """Indices of operators inside, of the region's backward functions, and of operators inside these."""
    trace = part.trace
    return [
        index
        for index, op in enumerate(trace.ops)
        if part.holds(op) or not functions.isdisjoint((index, *callers(trace, index)))
    ]


def _work(part: Part, functions: set[int]) -> list[Kernel | Copy]:
    later = {id(work) for work in part.backward_work(functions)}
    return [work for work in gpu_work(part.trace) if id(work) in later or part.launched(work)]


def _pieces(part: Part, functions: set[int]) -> dict[object, Union]:
    """Host time of the region by thread: its ranges, and uninterrupted runs of its backward functions."""
    intervals = defaultdict[object, list[Interval]](list)
    for mark in part.ranges:
        intervals[mark.thread].append(mark.interval)
    last: dict[object, tuple[bool, float]] = {}
    tops = [i for i, op in enumerate(part.trace.ops) if op.name.startswith(BACKWARD)]
    for index in sorted(tops, key=lambda i: part.trace.ops[i].start):
        op, ours = part.trace.ops[index], index in functions
        if ours:
            before, end = last.get(op.thread, (False, op.start))
            intervals[op.thread].append((end if before else op.start, op.end))
        last[op.thread] = ours, op.end
    return {thread: Union(found) for thread, found in intervals.items()}


def _in(pieces: dict[object, Union], event: Call | Range) -> bool:
    return event.thread in pieces and pieces[event.thread].holds(event.start)


def _windows(trace: Trace, kept: Trace, hosts: Iterable[Interval]) -> list[Interval]:
    """Device time that belongs to each interval of host time: from the first to the last work launched in it.

    Idle time before and after that work belongs to it too, as far as it lies in the host's interval. Time in which only
    work outside the region ran does not.
    """
    every_work, own_work = gpu_work(trace), gpu_work(kept)
    own_ids = {id(work) for work in own_work}
    busy = Union(work.interval for work in every_work)
    own_busy = Union(work.interval for work in own_work)
    others_busy = Union(work.interval for work in every_work if id(work) not in own_ids)
    windows: list[Interval] = []
    for host_start, host_end in hosts:
        launched = [w for w in own_work if w.launch is not None and host_start <= w.launch.start <= host_end]
        if not launched:
            windows += busy.gaps(host_start, host_end)  # without launches it costs only the device's idle time
            continue
        start, end = min(work.start for work in launched), max(work.end for work in launched)
        idle_since = max((busy_end for _, busy_end in busy if busy_end <= start), default=float("-inf"))
        idle_until = min((busy_start for busy_start, _ in busy if busy_start >= end), default=float("inf"))
        start = min(start, max(host_start, idle_since))
        end = max(end, min(host_end, idle_until))
        windows += _without(others_busy, own_busy, start, end)
    return windows


def _without(others: Union, own: Union, start: float, end: float) -> list[Interval]:
    """A window minus the time in which only work outside the region ran."""
    free = list(others.gaps(start, end))
    return [*free, *((max(s, start), min(e, end)) for s, e in own if e > start and s < end)]
