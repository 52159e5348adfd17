"""Places of a step's work: modules of the model, and lines of the user's code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from optexp.profiling.accounts import HOST_OPERATORS, PYTHON, Kinds, copy_account, long_python, named_kernels, on_host
from optexp.profiling.breakdown import SYNCHRONISE
from optexp.profiling.operators import OperatorTimes, innermost, lines_of, times
from optexp.trace import Line, Trace

MOST = 3  # most places that a sentence names


@dataclass(frozen=True)
class Places:
    """Modules and lines in which the work of each account happens.

    trace: of one step, with ranges around modules' calls and lines of the user's code
    """

    trace: Trace

    @cached_property
    def operators(self) -> OperatorTimes:
        return times(self.trace)

    @cached_property
    def lines(self) -> list[str | None]:
        return lines_of(self.trace, self.operators.backward)

    @cached_property
    def by_account(self) -> dict[str, dict[str, float]]:
        """µs by account and place."""
        found: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, place, us in (*self._gpu(), *self._host()):
            if place:
                found[name][place] += us
        return found

    def of(self, account: str) -> list[str]:
        """Places with most time of an account: "layers.0 (model.py:12)"."""
        places = self.by_account.get(account, {})
        return sorted(places, key=lambda place: -places[place])[:MOST]

    def _gpu(self) -> Iterator[tuple[str, str, float]]:
        at: dict[int | None, int] = {op.id: index for index, op in enumerate(self.trace.ops) if op.id is not None}
        for name, kernel in named_kernels(self.trace):
            if kernel.op is not None and kernel.op.id in at:
                yield name, self._place(at[kernel.op.id]), kernel.duration
        kinds = Kinds(self.trace)
        calls = dict(zip(self.trace.api, innermost(self.trace.lines, self.trace.api), strict=True))
        for copy in self.trace.copies:
            place = short_line(calls.get(copy.launch)) if copy.launch is not None else ""
            if copy.op is not None and copy.op.id in at:
                place = self._place(at[copy.op.id])
            yield copy_account(copy, kinds), place, copy.duration
        for call, line in calls.items():
            if SYNCHRONISE.match(call.name):
                yield "synchronisation", short_line(line), call.duration

    def _host(self) -> Iterator[tuple[str, str, float]]:
        if not self.trace.has_gpu:
            kinds = Kinds(self.trace)
            for index, op in enumerate(self.trace.ops):
                yield kinds.at(index), self._place(index), op.self_us
        for name, spans in ((PYTHON, long_python(self.trace)), (HOST_OPERATORS, on_host(self.trace))):
            for start, end in spans:
                around = [line for line in self.trace.lines if line.start <= (start + end) / 2 <= line.end]
                line = min(around, key=lambda line: line.duration, default=None)
                if line is not None and not (name == PYTHON and self._calls_a_module(line)):
                    yield name, short_line(line.name), end - start

    def _calls_a_module(self, line: Line) -> bool:
        """Whether a line calls a module: its Python time is then the module's and torch's, not the line's."""
        return any(line.start <= call.start and call.end <= line.end for call in self.trace.modules)

    def _place(self, index: int) -> str:
        module, line = self.operators.modules[index], short_line(self.lines[index])
        if module and not any(letter.isalpha() for letter in module):  # "0" of a Sequential says nothing by itself
            module = f"module {module}"
        return f"{module} ({line})" if module and line else module or line or ""


def short_line(line: str | None) -> str:
    """ "model.py:12" for a line with its whole path; empty for None."""
    return PurePath(line).name if line else ""
