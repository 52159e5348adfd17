"""Work that is gone, new or takes another time, operator by operator: matched by name, shapes and module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from optexp.profiling.operators import shapes, times
from optexp.profiling.view import View
from optexp.records.difference import Change
from optexp.trace import Kernel, Op, Trace, short_name

MOST_ROWS = 40
SMALL = 0.002  # of a step: smaller changes are left out

Key = tuple[str, str]  # an operator's name and shapes; a kernel's name alone, where its operator is unknown


@dataclass
class Work:
    """Calls and µs of a step, and the kernels that ran."""

    calls: float = 0.0
    us: float = 0.0
    kernels: Counter[str] = field(default_factory=Counter)


def changes(before: View, after: View) -> list[Change]:
    """Rows whose time changed, the largest change first."""
    modules = [_modules(arm.marked) for arm in (before, after)]
    old = _by_module(_works(before), modules[0], modules[1])
    new = _by_module(_works(after), modules[1], modules[0])
    rows = []
    for name, written, module in dict.fromkeys([*old, *new]):
        was, now = (found.get((name, written, module), Work()) for found in (old, new))
        change = Change(
            name, written, module, was.calls, now.calls, _names(was.kernels), _names(now.kernels), was.us, now.us
        )
        if abs(change.us) >= SMALL * before.breakdown.wall_us:
            rows.append(change)
    return sorted(rows, key=lambda change: -abs(change.us))[:MOST_ROWS]


def _works(arm: View) -> dict[Key, Work]:
    """Kernels by the operator that launched them; without a GPU, the operators' own time on the host."""
    found: dict[Key, Work] = defaultdict(Work)
    if arm.breakdown.busy is None:
        for op in arm.trace.ops:
            _add(found[op.name, shapes(op)], 1.0, op.self_us)
    for key, kernel in _kernels(arm):
        _add(found[key], 1.0, kernel.duration, short_name(kernel.name))
    steps = len(arm.trace.steps)
    return {key: replace(work, calls=work.calls / steps, us=work.us / steps) for key, work in found.items()}


def _add(work: Work, calls: float, us: float, kernel: str = "") -> None:
    work.calls += calls
    work.us += us
    if kernel:
        work.kernels[kernel] += 1


def _kernels(arm: View) -> Iterator[tuple[Key, Kernel]]:
    known: dict[tuple[object, ...], Op] = {}
    if arm.beside is not None:
        known = {kernel.configuration: kernel.op for kernel in arm.beside.kernels if kernel.op is not None}
    for kernel in arm.trace.kernels:
        op = kernel.op or known.get(kernel.configuration)
        yield (op.name, shapes(op)) if op is not None else (short_name(kernel.name), ""), kernel


def _modules(marked: Trace | None) -> Mapping[Key, Mapping[str, float]]:
    """The share of each module in an operator's calls, by operator."""
    if marked is None:
        return {}
    counted: dict[Key, Counter[str]] = defaultdict(Counter)
    for op, module in zip(marked.ops, times(marked).modules, strict=True):
        counted[op.name, shapes(op)][module or ""] += 1
    return {key: {module: calls / count.total() for module, calls in count.items()} for key, count in counted.items()}


def _by_module(
    works: Mapping[Key, Work], own: Mapping[Key, Mapping[str, float]], other: Mapping[Key, Mapping[str, float]]
) -> dict[tuple[str, str, str], Work]:
    """Divide work among modules by their calls. An arm without marks (`own` empty) uses the other arm's modules."""
    found = {}
    for key, work in works.items():
        for module, share in (own.get(key) or other.get(key) or {"": 1.0}).items():
            found[(*key, module)] = replace(work, calls=work.calls * share, us=work.us * share)
    return found


def _names(kernels: Counter[str]) -> str:
    return ", ".join(name for name, _ in kernels.most_common(2))
