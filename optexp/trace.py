"""A profiled pass over a few steady steps, read from its Chrome trace (`optexp.measurement.recorder` makes it)."""

from __future__ import annotations

import gzip
import json
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from optexp.measurement.recorder import STEP as STEP
from optexp.measurement.recorder import TIMED as TIMED
from optexp.measurement.recorder import record as record
from optexp.measurement.recorder import record_once as record_once
from optexp.records.profile import TopEntry
from optexp.support.garbage import uncollected

MODULE = "optexp.module:"  # prefix of the range of a module's call; then its path, "|" and its class
LINE = "optexp.line:"  # prefix of the range of a line of the user's code; then its file, ":" and its number
OURS = (STEP, MODULE, LINE)

LAUNCH = re.compile(r"cu(da)?(LaunchKernel|LaunchCooperativeKernel|GraphLaunch)")
GRAPH_LAUNCH = re.compile(r"cu(da)?GraphLaunch")

_WRAPPERS = ("cutlass::Kernel", "cutlass::Kernel2")  # templates whose argument names the kernel

MATRIX_OPS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::convolution")

_DTYPES = {
    "double": "float64",
    "float": "float32",
    "c10::Half": "float16",
    "c10::BFloat16": "bfloat16",
    "long int": "int64",
    "long": "int64",
    "int": "int32",
    "short int": "int16",
    "short": "int16",
    "signed char": "int8",
    "unsigned char": "uint8",
    "bool": "bool",
}


@dataclass(frozen=True, slots=True)
class Span:
    """A span of time: µs since the first event of the trace."""

    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration

    @property
    def interval(self) -> tuple[float, float]:
        return self.start, self.end


@dataclass(frozen=True, slots=True)
class Op(Span):
    """A CPU operator.

    inputs:   dtype and shape of its tensor arguments ("" where the trace has no dtype)
    written:  all arguments: numbers and flags as text, tensors as ""
    self_us:  host time outside the operators that it called
    parent:   index in `Trace.ops` of the operator that called it; -1 for an outermost operator
    sequence: autograd's number, which a forward operator and its backward function share
    """

    thread: object = None
    id: int | None = None
    inputs: tuple[tuple[str, tuple[int, ...]], ...] = ()
    written: tuple[str, ...] = ()
    self_us: float = 0.0
    parent: int = -1
    sequence: int | None = None


@dataclass(frozen=True, slots=True)
class Range(Span):
    """A range that code marked, or a Python frame."""

    thread: object = None


@dataclass(frozen=True, slots=True)
class ModuleCall(Range):
    """The call of a module; its name is the path in the model ("" is the model itself), `kind` its class."""

    kind: str = ""


@dataclass(frozen=True, slots=True)
class Line(Range):
    """One execution of a line of the user's code, with all that it calls; its name is "file:number"."""


@dataclass(frozen=True, slots=True)
class Call(Span):
    """A call of the CUDA runtime or driver."""

    thread: object = None
    correlation: int | None = None


@dataclass(frozen=True, slots=True)
class Kernel(Span):
    """A kernel on the GPU, with the call that launched it and the innermost operator around that call."""

    stream: int | None = None
    launch: Call | None = None
    op: Op | None = None
    in_graph: bool = False
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    registers: int | None = None  # of a thread
    shared_bytes: int | None = None  # of a block, static and dynamic

    @property
    def configuration(self) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
        """Name, grid and block: they identify a kernel of a graph among the kernels of a trace without a graph."""
        return self.name, self.grid, self.block

    @property
    def blocks(self) -> int | None:
        """Blocks in the grid; None where the trace has no grid."""
        if not self.grid:
            return None
        count = 1
        for size in self.grid:
            count *= size
        return count


@dataclass(frozen=True, slots=True)
class Copy(Span):
    """A memory copy (kind HtoD, DtoH, DtoD, ...) or fill (kind memset) on the GPU."""

    stream: int | None = None
    launch: Call | None = None
    kind: str = ""
    pageable: bool = False
    bytes: int = 0
    op: Op | None = None


@dataclass(frozen=True, slots=True)
class AllocatorEvent:
    """The CPU allocator after one allocation (positive) or release (negative), in bytes."""

    start: float
    bytes: int
    allocated: int


@dataclass(frozen=True)
class Trace:
    """The steps of a Chrome trace with their events; counts are per step unless a docstring says otherwise."""

    steps: tuple[Span, ...]
    kernels: tuple[Kernel, ...] = ()
    copies: tuple[Copy, ...] = ()
    api: tuple[Call, ...] = ()
    ops: tuple[Op, ...] = ()
    annotations: tuple[Range, ...] = ()  # ranges of DataLoader, optimizers, compiled graphs, regions, phases
    frames: tuple[Range, ...] = ()  # of Python, where they were recorded
    modules: tuple[ModuleCall, ...] = ()  # calls of modules, where they were marked
    lines: tuple[Line, ...] = ()  # lines of the user's code, where they were marked
    memory: tuple[AllocatorEvent, ...] = ()
    multiprocessors: int | None = None
    device: str = ""  # name of the first GPU
    timed_us: float | None = None

    @classmethod
    def read(cls, path: Path) -> Trace:
        """The steps of a Chrome trace of torch.profiler.

        Args:
            path: JSON, gzipped or not.

        Raises:
            ValueError: the file holds no step, or no JSON.
        """
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file, uncollected():
            return cls.parse(json.load(file))

    @classmethod
    def parse(cls, chrome: Mapping[str, Any]) -> Trace:
        """The steps of a decoded Chrome trace.

        Raises:
            ValueError: the trace holds no step.
        """
        events: dict[str, list[dict[str, Any]]] = defaultdict(list)
        for event in chrome["traceEvents"]:
            if event.get("ph") == "X" or event.get("name") == "[memory]":
                events[event.get("cat", "")].append(event)
        marks = [e for e in events["user_annotation"] if e["name"] == STEP]
        if not marks:
            raise ValueError(f"the trace holds no step: none of its ranges is called {STEP!r}")
        origin = min(float(e["ts"]) for e in marks)
        last = max(float(e["ts"]) + float(e["dur"]) for e in marks)

        def steady(categories: str, until: float = last) -> list[dict[str, Any]]:
            found = [e for c in categories.split() for e in events[c] if origin <= float(e["ts"]) <= until]
            return sorted(found, key=lambda e: float(e["ts"]))

        marked = steady("user_annotation")
        api = [_call(e, origin) for e in steady("cuda_runtime cuda_driver")]
        ops = _nest([_op(e, origin) for e in steady("cpu_op")])
        launches = {call.correlation: call for call in api if call.correlation is not None}
        by_id = {op.id: op for op in ops if op.id is not None}
        on_gpu = float("inf")  # the GPU works on after the host's last step
        devices = chrome.get("deviceProperties") or [{}]
        return cls(
            steps=tuple(Span(*_span(e, origin)) for e in sorted(marks, key=lambda e: float(e["ts"]))),
            kernels=tuple(_kernel(e, origin, launches, by_id) for e in steady("kernel", on_gpu)),
            copies=tuple(_copy(e, origin, launches, by_id) for e in steady("gpu_memcpy gpu_memset", on_gpu)),
            api=tuple(api),
            ops=tuple(ops),
            annotations=tuple(_range(e, origin) for e in marked if not e["name"].startswith(OURS)),
            frames=tuple(_range(e, origin) for e in steady("python_function")),
            modules=tuple(_module_call(e, origin) for e in marked if e["name"].startswith(MODULE)),
            lines=tuple(_line(e, origin) for e in marked if e["name"].startswith(LINE)),
            memory=tuple(
                AllocatorEvent(float(e["ts"]) - origin, int(e["args"]["Bytes"]), int(e["args"]["Total Allocated"]))
                for e in steady("cpu_instant_event")
                if e["args"].get("Device Type") == 0
            ),
            multiprocessors=devices[0].get("numSms"),
            device=devices[0].get("name", ""),
            timed_us=float(chrome[TIMED]) if TIMED in chrome else None,
        )

    @property
    def has_gpu(self) -> bool:
        """Whether the trace has work of a GPU; an idle GPU is no error."""
        return bool(self.kernels or self.copies)

    @cached_property
    def window(self) -> tuple[float, float]:
        """Start of the first step, and end of the last work on host or GPU, in µs."""
        return self.steps[0].start, max(span.end for span in (*self.steps, *self.kernels, *self.copies))

    def calls(self, name: str) -> float:
        """Calls per step of a function of the CUDA runtime or driver, as `cudaGraphLaunch`."""
        return sum(call.name == name for call in self.api) / len(self.steps)

    def compiled_calls(self) -> Counter[str]:
        """Calls of each compiled region of torch.compile, over all steps, by compile id ("0/0"; "" if unknown)."""
        heads = (op.name.partition("Torch-Compiled Region") for op in self.ops)
        regions = Counter(name.removeprefix(": ") for before, found, name in heads if found and not before)
        return regions or Counter("" for span in self.annotations if "CompiledFxGraph" in span.name)

    def op_dtypes(self, names: Collection[str]) -> Counter[str]:
        """Dtypes of the first tensor argument of these operators, with their counts over all steps."""
        return Counter(op.inputs[0][0] for op in self.ops if op.name in names and op.inputs and op.inputs[0][0])

    def top_kernels(self, count: int) -> list[TopEntry]:
        """The `count` kernels and copies with most GPU time: name, calls and µs a step, share of the GPU's time."""
        work = [(short_name(k.name), k.duration) for k in (*self.kernels, *self.copies)]
        return self._top(work, sum(us for _, us in work), count)

    def top_ops(self, count: int) -> list[TopEntry]:
        """The `count` operators with most host time of their own: name, calls and µs a step, share of the steps."""
        return self._top([(op.name, op.self_us) for op in self.ops], sum(s.duration for s in self.steps), count)

    def _top(self, work: Iterable[tuple[str, float]], whole: float, count: int) -> list[TopEntry]:
        groups: dict[str, list[float]] = defaultdict(list)
        for name, us in work:
            groups[name].append(us)
        ranked = sorted(groups.items(), key=lambda item: -sum(item[1]))[:count]
        steps = len(self.steps)
        return [
            TopEntry(name, len(times) / steps, sum(times) / whole if whole else 0.0, sum(times) / steps)
            for name, times in ranked
        ]

    @property
    def peak_cpu_bytes(self) -> int | None:
        """Peak bytes of CPU memory beyond those allocated before the steps; None where memory was not recorded."""
        if not self.memory:
            return None
        before = self.memory[0].allocated - self.memory[0].bytes
        return max(event.allocated for event in self.memory) - before


def short_name(name: str) -> str:
    """A kernel's name without template arguments, but with the functor that distinguishes it."""
    bare = re.sub(r"\(anonymous namespace\)::", "", name.removeprefix("void "))
    head, _, arguments = bare.partition("<")
    if not arguments:
        return head.partition("(")[0] if "Memcpy" not in head and "Memset" not in head else head
    base = head.rpartition("::")[2]
    if head in _WRAPPERS and (held := re.match(r"\w+", arguments)):
        return held[0]
    functor = re.search(r"(\w*(?:[Ff]unctor\w*|KernelImpl|_kernel_cuda|_kernel_impl|Ops?))\b", arguments)
    return f"{base}<{functor[1]}>" if functor and functor[1] != base else base


def _span(event: Mapping[str, Any], origin: float) -> tuple[str, float, float]:
    return event["name"], float(event["ts"]) - origin, float(event["dur"])


def _range(event: Mapping[str, Any], origin: float) -> Range:
    return Range(*_span(event, origin), event.get("tid"))


def _module_call(event: Mapping[str, Any], origin: float) -> ModuleCall:
    name, start, duration = _span(event, origin)
    path, _, kind = name.removeprefix(MODULE).partition("|")
    return ModuleCall(path, start, duration, event.get("tid"), kind)


def _line(event: Mapping[str, Any], origin: float) -> Line:
    name, start, duration = _span(event, origin)
    return Line(name.removeprefix(LINE), start, duration, event.get("tid"))


def _call(event: Mapping[str, Any], origin: float) -> Call:
    name, start, duration = _span(event, origin)
    # Some versions keep the ABI's version in the name: cudaLaunchKernel_v7000, cudaGraphLaunch_ptsz.
    name = re.sub(r"(_ptsz|_ptds|_v\d+)+$", "", name)
    return Call(name, start, duration, event.get("tid"), event.get("args", {}).get("correlation"))


def _op(event: Mapping[str, Any], origin: float) -> Op:
    arguments = event.get("args", {})
    inputs: list[tuple[str, tuple[int, ...]]] = []
    for kind, shape in zip(arguments.get("Input type", ()), arguments.get("Input Dims", ()), strict=False):
        if kind in _DTYPES:
            inputs.append((_DTYPES[kind], tuple(shape)))
        elif kind.startswith("c10::"):
            inputs.append((kind.removeprefix("c10::").lower(), tuple(shape)))
        elif shape and isinstance(shape[0], list):  # a list of tensors, whose dtypes the trace leaves out
            inputs.extend(("", tuple(item)) for item in shape)
    written = tuple(arguments.get("Concrete Inputs", ()))
    number = arguments.get("Sequence number")
    return Op(
        *_span(event, origin),
        event.get("tid"),
        arguments.get("External id"),
        tuple(inputs),
        written,
        sequence=None if number is None else int(number),
    )


def _nest(ops: list[Op]) -> list[Op]:
    """Set each operator's `parent`, and `self_us`: its time minus the time of the operators that it called."""
    open_by_thread: dict[object, list[int]] = defaultdict(list)
    in_children, parents = [0.0] * len(ops), [-1] * len(ops)
    for index in sorted(range(len(ops)), key=lambda i: (ops[i].start, -ops[i].duration)):
        op, stack = ops[index], open_by_thread[ops[index].thread]
        while stack and ops[stack[-1]].end <= op.start:
            stack.pop()
        if stack:
            in_children[stack[-1]] += op.duration
            parents[index] = stack[-1]
        stack.append(index)
    return [
        replace(op, self_us=max(op.duration - inside, 0.0), parent=parent)
        for op, inside, parent in zip(ops, in_children, parents, strict=True)
    ]


def _kernel(event: Mapping[str, Any], origin: float, launches: Mapping[Any, Call], ops: Mapping[Any, Op]) -> Kernel:
    arguments = event.get("args", {})
    launch = launches.get(arguments.get("correlation"))
    by_graph = launch is not None and GRAPH_LAUNCH.match(launch.name) is not None
    return Kernel(
        *_span(event, origin),
        stream=arguments.get("stream"),
        launch=launch,
        op=ops.get(arguments.get("External id")),
        in_graph=by_graph or bool(arguments.get("graph id")) or bool(arguments.get("graph node id")),
        grid=tuple(arguments.get("grid", ())),
        block=tuple(arguments.get("block", ())),
        registers=arguments.get("registers per thread"),
        shared_bytes=arguments.get("shared memory"),
    )


def _copy(event: Mapping[str, Any], origin: float, launches: Mapping[Any, Call], ops: Mapping[Any, Op]) -> Copy:
    arguments, name = event.get("args", {}), event["name"]
    kind = re.match(r"Memcpy (\w+)", name)
    return Copy(
        *_span(event, origin),
        stream=arguments.get("stream"),
        launch=launches.get(arguments.get("correlation")),
        kind=kind[1] if kind else "memset",
        pageable="Pageable" in name,
        bytes=int(arguments.get("bytes", 0)),
        op=ops.get(arguments.get("External id")),
    )
