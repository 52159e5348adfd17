"""Operators of a step: host and device time by name, by shapes and by module; and the tree of their calls."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

from optexp.profiling.categories import category
from optexp.profiling.work import work_of
from optexp.records.profile import CallEntry, ModuleEntry, OperatorEntry
from optexp.trace import Call, Copy, Kernel, Line, ModuleCall, Op, Trace

BACKWARD = "autograd::engine::evaluate_function: "


@dataclass(frozen=True)
class OperatorTimes:
    """Times of every operator of a trace, in the order of `Trace.ops`; all in µs over all steps.

    device:       kernels and copies of the operator and of the operators that it called
    device_self:  kernels and copies of which it is the innermost operator
    kernels:      number of kernels and copies in `device`
    modules:      path of the innermost module around it; a backward function has the module of its forward operator
    backward:     index of the forward operator of each backward function, by the function's index
    """

    device: list[float]
    device_self: list[float]
    kernels: list[int]
    modules: list[str | None]
    backward: dict[int, int]


def times(trace: Trace) -> OperatorTimes:
    """Times of the operators. Kernels belong to the operator that launched them; kernels of a graph belong to none."""
    place = {op.id: index for index, op in enumerate(trace.ops) if op.id is not None}
    self_us, launched = [0.0] * len(trace.ops), [0] * len(trace.ops)
    for work in gpu_work(trace):
        if work.op is not None and work.op.id is not None:
            self_us[place[work.op.id]] += work.duration
            launched[place[work.op.id]] += 1
    total_us, kernels = [0.0] * len(trace.ops), [0] * len(trace.ops)
    for index, us in enumerate(self_us):
        outer = index
        while outer >= 0 and launched[index]:
            total_us[outer] += us
            kernels[outer] += launched[index]
            outer = trace.ops[outer].parent
    backward = backward_of(trace)
    return OperatorTimes(total_us, self_us, kernels, modules_of(trace, backward), backward)


def gpu_work(trace: Trace) -> list[Kernel | Copy]:
    """Kernels and copies."""
    return [*trace.kernels, *trace.copies]


def backward_of(trace: Trace) -> dict[int, int]:
    """Index of the forward operator of each backward function, by the function's index: both have one autograd number.

    Operators share a number until autograd records one for backward. So the last operator of a number counts; where
    operators of that number are nested, the outermost of them.
    """
    forward: dict[int, int] = {}
    for index, op in enumerate(trace.ops):
        if op.sequence is None or op.name.startswith(BACKWARD) or _in_backward(trace, index):
            continue
        held = forward.get(op.sequence)
        if held is None or held not in callers(trace, index):
            forward[op.sequence] = index
    return {
        index: forward[op.sequence]
        for index, op in enumerate(trace.ops)
        if op.name.startswith(BACKWARD) and op.sequence is not None and op.sequence in forward
    }


def _in_backward(trace: Trace, index: int) -> bool:
    return any(trace.ops[at].name.startswith(BACKWARD) for at in callers(trace, index))


def callers(trace: Trace, index: int) -> Iterator[int]:
    """Indices of the operators around an operator, the innermost first."""
    at = trace.ops[index].parent
    while at >= 0:
        yield at
        at = trace.ops[at].parent


def modules_of(trace: Trace, backward: dict[int, int]) -> list[str | None]:
    """The innermost module that each operator was called in; None outside all of them."""
    return _inherited(trace, innermost(trace.modules, trace.ops), backward)


def lines_of(trace: Trace, backward: dict[int, int]) -> list[str | None]:
    """The line of the user's code that called each operator; of a backward function, its forward operator's line.

    A backward function without a forward operator has the line that called `backward`.
    """
    asked = innermost(trace.lines, trace.ops)
    first = [None if _in_backward_pass(trace, index) else line for index, line in enumerate(asked)]
    placed = _inherited(trace, first, backward)
    return [line or before for line, before in zip(placed, asked, strict=True)]


def innermost(ranges: Sequence[ModuleCall | Line], spans: Sequence[Op | Call]) -> list[str | None]:
    """Name of the innermost range of its own thread in which each span begins; None where there is none."""
    found: list[str | None] = [None] * len(spans)
    by_thread: dict[object, list[tuple[float, float, str]]] = defaultdict(list)
    for span in sorted(ranges, key=lambda span: (span.start, -span.duration)):
        by_thread[span.thread].append((span.start, span.end, span.name))
    for thread, marked in by_thread.items():
        following, around = 0, list[tuple[float, str]]()
        for index in sorted((i for i, span in enumerate(spans) if span.thread == thread), key=lambda i: spans[i].start):
            start = spans[index].start
            while following < len(marked) and marked[following][0] <= start:
                while around and around[-1][0] <= marked[following][0]:
                    around.pop()
                around.append((marked[following][1], marked[following][2]))
                following += 1
            while around and around[-1][0] <= start:
                around.pop()
            found[index] = around[-1][1] if around else None
    return found


def _inherited(trace: Trace, found: list[str | None], backward: dict[int, int]) -> list[str | None]:
    """Places of operators, with each backward function at the place of its forward operator."""
    for function, operator in backward.items():
        found[function] = found[operator]
    for index in range(len(trace.ops)):  # operators inside a backward function have its place
        if found[index] is None:
            found[index] = next((found[at] for at in callers(trace, index) if found[at] is not None), None)
    return found


# --- tables ------------------------------------------------------------------------------------------------------


@dataclass
class _Sums:
    calls: int = 0
    host: float = 0.0
    host_self: float = 0.0
    device: float = 0.0
    device_self: float = 0.0
    kernels: int = 0
    bytes: float = 0.0
    flops: float = 0.0
    backward_host: float = 0.0
    backward_device: float = 0.0


Key = tuple[str, str, str]  # name, shapes, module


def by_name(trace: Trace) -> list[OperatorEntry]:
    """One row for each operator, those with most device time of their own first, then by host time of their own."""
    return _table(trace, lambda op, module: (op.name, "", ""))


def by_shape(trace: Trace) -> list[OperatorEntry]:
    """One row for each operator with its inputs' dtypes and shapes."""
    return _table(trace, lambda op, module: (op.name, shapes(op), ""))


def by_module(trace: Trace) -> list[OperatorEntry]:
    """One row for each operator in each module: "" outside the model, "(model)" in the model but in no submodule."""
    return _table(trace, lambda op, module: (op.name, "", "" if module is None else module or "(model)"))


def _table(trace: Trace, key: Callable[[Op, str | None], Key]) -> list[OperatorEntry]:
    op_times, sums, twice = times(trace), defaultdict[Key, _Sums](_Sums), repeated(trace)
    for index, op in enumerate(trace.ops):
        outer = index
        while outer in twice:
            outer = trace.ops[outer].parent
        row = sums[key(trace.ops[outer], op_times.modules[outer])]
        row.host_self += op.self_us
        row.device_self += op_times.device_self[index]
        if outer != index:
            continue
        row.calls += 1
        row.host += op.duration
        row.device += op_times.device[index]
        row.kernels += op_times.kernels[index]
        if (work := work_of(op)) is not None:
            row.bytes += work[0]
            row.flops += work[1]
    for function, operator in op_times.backward.items():
        row = sums[key(trace.ops[operator], op_times.modules[operator])]
        row.backward_host += trace.ops[function].duration
        row.backward_device += op_times.device[function]
    steps = len(trace.steps)
    host, device = sum(row.host_self for row in sums.values()), sum(row.device_self for row in sums.values())
    rows = [
        OperatorEntry(
            name=name,
            category=category(name),
            shapes=written,
            module=module,
            calls=row.calls / steps,
            kernels=row.kernels / steps,
            host_us=row.host / steps,
            host_self_us=row.host_self / steps,
            device_us=row.device / steps,
            device_self_us=row.device_self / steps,
            host_share=row.host_self / host if host else 0.0,
            device_share=row.device_self / device if device else 0.0,
            backward_host_us=row.backward_host / steps,
            backward_device_us=row.backward_device / steps,
            bytes=row.bytes / steps or None,
            flops=row.flops / steps or None,
        )
        for (name, written, module), row in sums.items()
    ]
    return sorted(rows, key=lambda row: (-row.device_share, -row.host_share))


def repeated(trace: Trace) -> set[int]:
    """Indices of operators whose caller has the same name and calls nothing else (overloads): both count once."""
    called = Counter(op.parent for op in trace.ops)
    return {
        index
        for index, op in enumerate(trace.ops)
        if op.parent >= 0 and called[op.parent] == 1 and trace.ops[op.parent].name == op.name
    }


def shapes(op: Op) -> str:
    """The inputs as people write them: "float32[64, 128], float32[128]"."""
    return ", ".join(f"{dtype}{list(shape)}" for dtype, shape in op.inputs)


def by_path(trace: Trace) -> list[ModuleEntry]:
    """One row for each module that was called, in the order of the calls; empty where none was marked."""
    found, steps = times(trace), len(trace.steps)
    kinds = {call.name: call.kind for call in trace.modules}
    calls = Counter(call.name for call in trace.modules)
    host, forward, backward_host, backward = (defaultdict[str, float](float) for _ in range(4))
    for call in trace.modules:
        host[call.name] += call.duration
    for index, module in enumerate(found.modules):
        if module is None or not found.device_self[index] or _in_backward_pass(trace, index):
            continue
        for path in outer_paths(module, kinds):
            forward[path] += found.device_self[index]
    for function, operator in found.backward.items():
        for path in outer_paths(found.modules[operator], kinds):
            backward_host[path] += trace.ops[function].duration
            backward[path] += found.device[function]
    on_device = bool(sum(forward.values()) + sum(backward.values()))
    cost = {
        path: (forward[path] + backward[path]) if on_device else (host[path] + backward_host[path]) for path in kinds
    }
    whole = cost.get("") or max(cost.values(), default=0.0)
    return [
        ModuleEntry(
            name=path,
            kind=kind,
            calls=calls[path] / steps,
            share=cost[path] / whole if whole else 0.0,
            host_us=host[path] / steps,
            device_us=forward[path] / steps,
            backward_host_us=backward_host[path] / steps,
            backward_device_us=backward[path] / steps,
        )
        for path, kind in kinds.items()
    ]


def outer_paths(module: str | None, known: Container[str]) -> Iterator[str]:
    """A module's path and those of the modules around it, "" last, without modules that were never called."""
    if module is None:
        return
    parts = module.split(".") if module else []
    for length in range(len(parts), -1, -1):
        if (path := ".".join(parts[:length])) in known:
            yield path


def _in_backward_pass(trace: Trace, index: int) -> bool:
    return trace.ops[index].name.startswith(BACKWARD) or _in_backward(trace, index)


# --- who called whom ---------------------------------------------------------------------------------------------


@dataclass
class Node:
    """Calls of one operator, or of a kernel below it, along one path from the outermost operator; per step."""

    name: str
    calls: float = 0.0
    host_us: float = 0.0
    device_us: float = 0.0
    kernel: bool = False
    children: dict[str, Node] = field(default_factory=dict)

    def flattened(self, least: float, depth: int = 0) -> Iterator[CallEntry]:
        """Entries for all nodes below, without branches of less than `least` µs on host and device."""
        for node in self.ranked():
            if max(node.host_us, node.device_us) >= least:
                yield CallEntry(node.name, depth, node.calls, node.kernel, node.host_us, node.device_us)
                yield from node.flattened(least, depth + 1)

    def child(self, name: str, kernel: bool = False) -> Node:
        return self.children.setdefault(name, Node(name, kernel=kernel))

    def ranked(self) -> list[Node]:
        """Children, those with most device time first, then by host time."""
        return sorted(self.children.values(), key=lambda node: (-node.device_us, -node.host_us))


def call_tree(trace: Trace) -> Node:
    """The tree of operators' calls, with kernels and copies below the operators that launched them."""
    found, steps, root = times(trace), len(trace.steps), Node("step")
    nodes: list[Node] = [root] * len(trace.ops)
    for index in sorted(range(len(trace.ops)), key=lambda i: (trace.ops[i].start, -trace.ops[i].duration)):
        op = trace.ops[index]
        node = nodes[index] = (nodes[op.parent] if op.parent >= 0 else root).child(op.name)
        node.calls += 1 / steps
        node.host_us += op.duration / steps
        node.device_us += found.device[index] / steps
    place = {op.id: index for index, op in enumerate(trace.ops)}
    for work in gpu_work(trace):
        index = place.get(work.op.id, -1) if work.op is not None else -1
        node = (nodes[index] if index >= 0 else root).child(work.name, kernel=True)
        node.calls += 1 / steps
        node.device_us += work.duration / steps
    top = [node for node in root.children.values() if not node.kernel]
    root.calls, root.host_us = 1.0, sum(node.host_us for node in top)
    root.device_us = sum(node.device_us for node in root.children.values())
    return root
