"""ARM: allocations on a CPU with operator and line, from the tree of events of torch.profiler."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from torch.profiler import profile, record_function

from optexp.profiling.allocations import Event, user_line

MARK = "optexp.memory:"  # begins the range that stands for a moment
PLAIN = ("aten::empty", "aten::new_empty", "aten::resize_", "aten::zeros", "aten::full")  # allocate for their caller
COMPILED = ("## Call CompiledFxGraph", "Torch-Compiled Region", "CompiledFunction")


class Marks:
    """Moments of a trace, numbered from 0: clocks of Python and of the trace differ."""

    def __init__(self) -> None:
        self.made = 0

    def now(self) -> int:
        number, self.made = self.made, self.made + 1
        with record_function(f"{MARK}{number}"):
            return number


def events_of(profiler: profile, marks: int) -> tuple[list[Event], list[int]]:
    """Allocations and releases in their order, and for each mark the number of events before it."""
    from torch._C._profiler import _EventType

    assert profiler.profiler is not None
    results = profiler.profiler.kineto_results
    assert results is not None
    found: list[tuple[int, Event | int]] = []
    for event in _walk(results.experimental_event_tree()):
        if event.name.startswith(MARK):
            found.append((event.start_time_ns, int(event.name.removeprefix(MARK))))
        elif event.tag == _EventType.Allocation and event.extra_fields.device.type == "cpu":
            fields = event.extra_fields
            made = (0, _line(event), _op(event)) if fields.alloc_size > 0 else ()
            if fields.ptr:
                found.append((event.start_time_ns, Event(fields.ptr, fields.alloc_size, *made)))
    found.sort(key=lambda item: item[0])
    events: list[Event] = []
    moments = [0] * marks
    for _, item in found:
        if isinstance(item, Event):
            events.append(item)
        else:
            moments[item] = len(events)
    return events, moments


def _walk(roots: list[Any]) -> Iterator[Any]:
    waiting = list(reversed(roots))
    while waiting:
        event = waiting.pop()
        yield event
        waiting += reversed(event.children)


def _parents(event: Any) -> Iterator[Any]:
    parent = event.parent
    while parent is not None:
        yield parent
        parent = parent.parent


def _op(event: Any) -> str:
    """The innermost operator that does more than to allocate."""
    from torch._C._profiler import _EventType

    for parent in _parents(event):
        if parent.tag == _EventType.TorchOp and not parent.name.startswith((*PLAIN, "autograd::engine")):
            return "compiled code" if parent.name.startswith(COMPILED) else str(parent.name).removeprefix("aten::")
    return ""


def _line(event: Any) -> str:
    """The innermost line of the user's code: each call in the tree tells the line that it came from."""
    from torch._C._profiler import _EventType

    for parent in _parents(event):
        if parent.tag in (_EventType.PyCall, _EventType.PyCCall):
            caller = parent.extra_fields.caller
            if line := _shown(caller.file_name, caller.line_number):
                return line
    return ""


@cache
def _shown(file: str, line: int) -> str:
    return user_line([(file, line)])
