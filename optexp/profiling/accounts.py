"""Accounts of a step: its time by the kind of work that it pays for. They add up to the step.

A breakdown says what holds a step (memory, arithmetic, the host); accounts say what the time is spent on, so that two
steps can be subtracted.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cache

from optexp.profiling.breakdown import GAPS, OUTSIDE, Breakdown
from optexp.profiling.categories import category
from optexp.profiling.intervals import Union
from optexp.profiling.operators import BACKWARD, callers
from optexp.trace import Copy, Kernel, Op, Trace, short_name

OVERLAP = "overlap"
PYTHON, COMPILATION, HOST_OPERATORS = "python", "compilation", "operators on the host"
UNKNOWN = "other operators"  # of no kind that is known, as custom ones
LONG_US = 100.0  # of the host outside operators, or in an operator that launches nothing; a launch takes less

_COMPILING = re.compile(r".*\(dynamo_timed\)$")
_COPIES = {"HtoD": "copies to the device", "DtoH": "copies to the host", "DtoD": "copies on the device"}
_FORWARD_ONLY = re.compile(  # operators that no backward formula calls: in a backward pass they compute forward again
    r"aten::(linear|gelu|relu|silu|softmax|layer_norm|batch_norm|group_norm|conv[123]d|dropout|embedding"
    r"|scaled_dot_product_attention)$"
)
_COPYING = {
    f"aten::{name}" for name in ("copy_", "_to_copy", "to", "clone", "contiguous", "reshape", "flatten", "type_as")
}
_COMPOUND = ("matrix", "normalization", "activation", "embedding")
_FILL = re.compile(r"aten::(fill_|zero_|zeros|ones|full)")
_CONVOLUTION = re.compile(r"aten::.*conv|.*[Cc]onv")
_LAYOUT_KERNEL = re.compile(r"(void )?(\w+::)*(nchwToNhwc|nhwcToNchw|.*transpose|.*[cC]onvertTensor)", re.IGNORECASE)
_BY_KERNEL = {  # where no operator is known, as in a graph; the first pattern that is found
    "attention": r"flash|fmha|attention|mem_eff",
    "convolutions": r"conv|wgrad|dgrad|implicit",
    "matrix products": r"gemm|xmma|cutlass|splitK|gemv|nvjet|_mm_",
    "compiled kernels": r"^triton_",
    "optimizer": r"multi_tensor_apply|adam|sgd",
    "normalization": r"layer_?norm|batch_?norm|bn_fw|bn_bw|LayerNorm|GammaBeta|rms_norm",
    "activation": r"[gG]elu|relu|softmax|SoftMax|silu|sigmoid|tanh|threshold",
    "reduction": r"reduce",
    "embedding": r"embedding|indexSelect|index_select",
    "indexing and concatenation": r"CatArray|index|gather|scatter",
    "communication": r"nccl",
    "elementwise": r"elementwise",
}
_NAMED = {
    "matrix": "matrix products",
    "compiled": "compiled kernels",
    "memory": "indexing and concatenation",
    "autograd": "autograd",
    "other": UNKNOWN,  # "other" is a gap
}


@dataclass
class Account:
    """Work of one kind in a step.

    us:    of the step; negative where work side by side saves time
    calls: kernels, copies, gaps or, on a CPU, operators
    works: µs by kernel (on a CPU: operator), as they are listed
    units: calls by kernel or operator
    """

    us: float = 0.0
    calls: float = 0.0
    works: dict[str, float] = field(default_factory=dict)
    units: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, us: float) -> None:
        self.us += us
        self.calls += 1
        self.works[name] = self.works.get(name, 0.0) + us
        self.units[name] = self.units.get(name, 0.0) + 1

    def plus(self, other: Account) -> Account:
        """Both together, of different works."""
        works, units = {**self.works, **other.works}, {**self.units, **other.units}
        return Account(self.us + other.us, self.calls + other.calls, works, units)

    def per_step(self, steps: int, scale: float = 1.0) -> Account:
        """The same of one step, with times multiplied by `scale`."""
        works = {name: us * scale / steps for name, us in self.works.items()}
        units = {name: calls / steps for name, calls in self.units.items()}
        return Account(self.us * scale / steps, self.calls / steps, works, units)


def accounts(trace: Trace, found: Breakdown, beside: Trace | None = None) -> dict[str, Account]:
    """Accounts by name; their µs add up to the breakdown's step.

    Args:
        trace: Of one arm.
        found: Its breakdown, of which gaps and copies are taken.
        beside: The same work launched kernel by kernel, whose operators stand for those of kernels in a graph.
    """
    together = _of_gpu(trace, found, beside) if found.busy is not None else _of_cpu(trace, found)
    return {name: account for name, account in together.items() if account.us or account.calls}


def _of_gpu(trace: Trace, found: Breakdown, beside: Trace | None) -> dict[str, Account]:
    steps, sums = len(trace.steps), defaultdict[str, Account](Account)
    for name, kernel in named_kernels(trace, beside):
        sums[name].add(short_name(kernel.name), kernel.duration)
    kernels = {name: account.per_step(steps) for name, account in sums.items()}
    side_by_side = sum(account.us for account in kernels.values()) - found.kernel_share * found.wall_us
    together = {**kernels, OVERLAP: Account(-side_by_side if abs(side_by_side) > 1e-6 else 0.0)}
    for part in (_copies(trace, found.us("exposed_copies")), _gaps(trace, found)):
        for name, account in part.items():  # compilation has kernels and gaps
            together[name] = together[name].plus(account) if name in together else account
    return together


def named_kernels(trace: Trace, beside: Trace | None = None) -> list[tuple[str, Kernel]]:
    """Each kernel with the name of its account."""
    kinds = Kinds(trace)
    known = {k.configuration: name for name, k in named_kernels(beside)} if beside is not None else {}
    named = []
    for kernel in trace.kernels:
        name = kinds.of(kernel.op) if kernel.op is not None else None
        name = None if name == UNKNOWN else name  # its kernel's name may tell
        if name is None or kernel.in_graph:
            name = known.get(kernel.configuration) or name or of_kernel(kernel.name)
        named.append(("layout copies" if _LAYOUT_KERNEL.match(kernel.name) else name, kernel))
    return named


def of_kernel(name: str) -> str:
    """The account of a kernel by its name alone."""
    found = (account for account, pattern in _BY_KERNEL.items() if re.search(pattern, name))
    return next(found, "other kernels")


class Kinds:
    """The account of each operator of a trace, by its name and by the operators around it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.place = {op.id: index for index, op in enumerate(trace.ops) if op.id is not None}
        self.optimizer = Union(s.interval for s in trace.annotations if s.name.startswith("Optimizer.step"))

    def of(self, op: Op) -> str | None:
        """Of an operator that the trace holds; None for one without identity."""
        return self.at(self.place[op.id]) if op.id in self.place else None

    def at(self, index: int) -> str:
        """Of the operator at an index of `Trace.ops`."""
        op = self.trace.ops[index]
        around = [self.trace.ops[at].name for at in callers(self.trace, index)]
        chain = [_word(name) for name in (op.name, *around)]
        if any(word.compiles for word in chain):
            return COMPILATION
        if self.optimizer.holds(op.start):
            return "optimizer"
        if _recomputes(chain):
            return "recomputation"
        if any(word.attends for word in chain):
            return "attention"
        return _copy_kind(op, around) or _plain_kind(op.name, around)


@dataclass(frozen=True)
class _Word:
    """Parts that an operator's name says it has in a step."""

    compiles: bool
    attends: bool
    goes_back: bool
    only_forward: bool


@cache
def _word(name: str) -> _Word:
    return _Word(
        compiles=bool(_COMPILING.match(name)),
        attends="attention" in name.lower(),
        goes_back=name.startswith(BACKWARD),
        only_forward=bool(_FORWARD_ONLY.match(name)),
    )


def _recomputes(chain: list[_Word]) -> bool:
    """Whether a forward operator runs inside a backward function, as under gradient checkpointing."""
    inside = next((place for place, word in enumerate(chain) if word.goes_back), None)
    return inside is not None and any(word.only_forward for word in chain[:inside])


def _copy_kind(op: Op, around: list[str]) -> str | None:
    """The account of a copy by an operator; None for anything else, and for a copy that is a part of other work.

    A cast is never a part: autocast casts inside of the operator that it prepares.
    """
    if op.name not in _COPYING:
        return None
    if len(op.inputs) >= 2 and op.inputs[0][0] != op.inputs[1][0]:
        return "casts"
    part = any(name.startswith("aten::") and name not in _COPYING for name in around)
    return None if part else "layout copies"


def _plain_kind(name: str, around: Iterable[str]) -> str:
    if _CONVOLUTION.match(name):
        return "convolutions"
    if _FILL.match(name):
        return "fills"
    kind = category(name)
    if kind in ("elementwise", "reduction", "memory"):  # parts of a compound operator count as that operator
        kind = next((k for k in map(category, around) if k in _COMPOUND), kind)
    return _NAMED.get(kind, kind)


def _copies(trace: Trace, exposed_us: float) -> dict[str, Account]:
    """Copies that no kernel hides, by kind; the kinds share the exposed time by their own."""
    sums, kinds = defaultdict[str, Account](Account), Kinds(trace)
    for copy in trace.copies:
        sums[copy_account(copy, kinds)].add(copy.kind, copy.duration)
    whole = sum(account.us for account in sums.values())
    steps = len(trace.steps)
    return {
        name: account.per_step(steps, exposed_us * steps / whole if whole else 0.0) for name, account in sums.items()
    }


def copy_account(copy: Copy, kinds: Kinds) -> str:
    """The account of a copy: its direction and whether memory of the host is pageable; the operator's within a device.

    kinds: of the trace that the copy is in
    """
    if copy.kind == "DtoD" and copy.op is not None and (name := kinds.of(copy.op)) is not None:
        return name
    return ("pageable " if copy.pageable else "") + _COPIES.get(copy.kind, "fills")


def _gaps(trace: Trace, found: Breakdown) -> dict[str, Account]:
    """Gaps of the breakdown; of those in which the host was dispatching, long Python and compilation stand apart."""
    steps, gaps = len(trace.steps), {name: Account(found.us(name)) for name in GAPS}
    busy = Union([*(k.interval for k in trace.kernels), *(c.interval for c in trace.copies)])
    traced = sum(end - start for start, end in busy.gaps(*trace.window)) / steps
    traced -= found.us("launch_gap") + found.us("other")
    scale = found.host_late * found.wall_us / traced if traced > 0 else 0.0  # tracing slows the host
    left = found.us("dispatch")
    spans_of = {COMPILATION: compiling(trace), HOST_OPERATORS: on_host(trace), PYTHON: long_python(trace)}
    for name, spans in spans_of.items():
        idle = sum(end - start - busy.within(start, end) for start, end in spans) / steps
        us = min(left, scale * idle)
        gaps[name] = Account(us, len(list(spans)) / steps)
        left -= us
    return {**gaps, "dispatch": Account(left, found.launches or 0.0)}


def compiling(trace: Trace) -> Union:
    """When torch.compile compiled: versions of torch mark it as a range or as an operator."""
    return Union(span.interval for span in (*trace.annotations, *trace.ops) if _COMPILING.match(span.name))


def on_host(trace: Trace) -> Union:
    """When operators themselves computed on the host for long, though the step has a GPU: without a CUDA call."""
    inside: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for op in trace.ops:
        inside[op.parent].append(op.interval)
    calls = Union(call.interval for call in trace.api)
    found = []
    compilation = compiling(trace)
    for index, op in enumerate(trace.ops):
        if op.self_us >= LONG_US and not _calls_python(op) and not compilation.holds(op.start):
            own = Union([*inside[index], *calls.overlapping(op.start, op.end)]).gaps(op.start, op.end)
            found += [gap for gap in own if gap[1] - gap[0] >= LONG_US]
    return Union(found)


def _calls_python(op: Op) -> bool:
    """Whether what the operator does itself is Python: an autograd function, or the way into compiled code."""
    return "::" not in op.name or op.name.startswith(BACKWARD) or category(op.name) in ("autograd", "compiled")


def long_python(trace: Trace) -> Union:
    """When the stepping thread was in no operator, no CUDA call and no loader for long at a time.

    Beside a GPU, Python inside of autograd functions counts, too; on a CPU that is time of operators.
    """
    known = Union(
        [
            *(op.interval for op in trace.ops if not (trace.has_gpu and _calls_python(op))),
            *(call.interval for call in trace.api),
            *(s.interval for s in trace.annotations if s.name.startswith("enumerate(DataLoader")),
            *compiling(trace),
        ]
    )
    found = []
    for step in trace.steps:
        found += [gap for gap in known.gaps(step.start, step.end) if gap[1] - gap[0] >= LONG_US]
    return Union(found)


def _of_cpu(trace: Trace, found: Breakdown) -> dict[str, Account]:
    """Operators' own time on the host; what passes outside them, and in the loader, as in the breakdown."""
    steps, kinds, sums = len(trace.steps), Kinds(trace), defaultdict[str, Account](Account)
    for index, op in enumerate(trace.ops):
        sums[kinds.at(index)].add(op.name, op.self_us)
    own = sum(account.us for account in sums.values()) / steps
    outside, loading = found.us(OUTSIDE), found.us("data_loading")
    inside = found.wall_us - outside - loading
    named = {name: a.per_step(steps, inside / own if own else 0.0) for name, a in sums.items()}
    spans = long_python(trace)
    long_us = min(spans.total / steps, outside)
    operators = Union(op.interval for op in trace.ops)
    compile_us = sum(end - start - operators.within(start, end) for start, end in compiling(trace)) / steps
    compile_us = min(compile_us, outside - long_us)
    inside_us = named.pop(COMPILATION, Account()).us
    return named | {
        "data_loading": Account(loading),
        COMPILATION: Account(inside_us + compile_us, len(list(compiling(trace))) / steps),
        PYTHON: Account(long_us, len(list(spans)) / steps),
        OUTSIDE: Account(outside - long_us - compile_us, found.ops),
    }
