"""ARM: ranges in a trace around each line of the user's code."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.profiler import record_function

from optexp.python_state.variables import is_users_file
from optexp.trace import LINE

MOST = 2000  # executions of a line that are marked: a loop may have millions, each a range in the trace


@contextmanager
def lines_marked() -> Iterator[None]:
    """Inside, each line of the user's code on this thread is a range "optexp.line:<file>:<number>".

    A line's range ends where the next line of its function begins, and includes what it calls. A line that runs more
    than `MOST` times is not marked from then on. A debugger's trace function is put back afterwards.
    """
    open_ranges: dict[FrameType, Any] = {}
    users: dict[str, bool] = {}
    marked = Counter[str]()
    ended = False

    def close(frame: FrameType) -> None:
        if (mark := open_ranges.pop(frame, None)) is not None:
            mark.__exit__(None, None, None)

    def in_function(frame: FrameType, event: str, _: object) -> Any:
        if event in ("line", "return"):
            close(frame)
        if event == "line" and not ended:  # a debugger calls this for generators that were begun inside
            name = f"{LINE}{frame.f_code.co_filename}:{frame.f_lineno}"
            marked[name] += 1
            if marked[name] <= MOST:
                open_ranges[frame] = mark = record_function(name)
                mark.__enter__()
        return in_function

    def on_call(frame: FrameType, event: str, _: object) -> Any:
        file = frame.f_code.co_filename
        if file not in users:
            users[file] = is_users_file(file)
        return in_function if users[file] else None

    before = sys.gettrace()
    sys.settrace(on_call)
    try:
        yield
    finally:
        ended = True
        sys.settrace(before)
        for frame in reversed(list(open_ranges)):
            close(frame)
