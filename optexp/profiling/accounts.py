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
UNKNOWN = "other operators"  # of no known kind, such as custom operators
LONG_US = 100.0  # shortest host time, outside operators or in one that launches nothing, that counts as long

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
_BY_KERNEL = {  # for kernels without a known operator, as in a graph; the first pattern that matches counts
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

    us:    time in the step; negative where parallel work saves time
    calls: number of kernels, copies, gaps or, on a CPU, operators
    works: µs by name of the kernel or, on a CPU, of the operator
    units: calls by the same names
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
        """The sum of two accounts that share no kernel or operator."""
        works, units = {**self.works, **other.works}, {**self.units, **other.units}
        return Account(self.us + other.us, self.calls + other.calls, works, units)

    def per_step(self, steps: int, scale: float = 1.0) -> Account:
        """Turn sums over `steps` steps into means per step; times are multiplied by `scale`."""
        works = {name: us * scale / steps for name, us in self.works.items()}
        units = {name: calls / steps for name, calls in self.units.items()}
        return Account(self.us * scale / steps, self.calls / steps, works, units)


def accounts(trace: Trace, split: Breakdown, beside: Trace | None = None) -> dict[str, Account]:
    """Accounts by name; their µs add up to the breakdown's step.

    Args:
        trace: Trace of one arm.
        split: The trace's breakdown: its gaps and exposed copies become accounts.
        beside: A trace of the same work without a graph: it names the operators of kernels that a graph launches.
    """
    merged = _of_gpu(trace, split, beside) if split.busy is not None else _of_cpu(trace, split)
    return {name: account for name, account in merged.items() if account.us or account.calls}


def _of_gpu(trace: Trace, split: Breakdown, beside: Trace | None) -> dict[str, Account]:
    steps, sums = len(trace.steps), defaultdict[str, Account](Account)
    for name, kernel in named_kernels(trace, beside):
        sums[name].add(short_name(kernel.name), kernel.duration)
    kernels = {name: account.per_step(steps, split.clock) for name, account in sums.items()}
    side_by_side = sum(account.us for account in kernels.values()) - split.kernel_share * split.wall_us
    merged = {**kernels, OVERLAP: Account(-side_by_side if abs(side_by_side) > 1e-6 else 0.0)}
    for part in (_copies(trace, split.us("exposed_copies")), _gaps(trace, split)):
        for name, account in part.items():  # compilation has kernels and gaps
            merged[name] = merged[name].plus(account) if name in merged else account
    return merged


def named_kernels(trace: Trace, beside: Trace | None = None) -> list[tuple[str, Kernel]]:
    """Each kernel with the name of its account; `beside`: see `accounts`."""
    kinds = Kinds(trace)
    known = {k.configuration: name for name, k in named_kernels(beside)} if beside is not None else {}
    named = []
    for kernel in trace.kernels:
        name = kinds.of(kernel.op) if kernel.op is not None else None
        name = None if name == UNKNOWN else name  # the kernel's name may be known
        if name is None or kernel.in_graph:
            name = known.get(kernel.configuration) or name or of_kernel(kernel.name)
        named.append(("layout copies" if _LAYOUT_KERNEL.match(kernel.name) else name, kernel))
    return named


def of_kernel(name: str) -> str:
    """The account of a kernel by its name alone."""
    matching = (account for account, pattern in _BY_KERNEL.items() if re.search(pattern, name))
    return next(matching, "other kernels")


class Kinds:
    """The account of each operator of a trace, by its name and by the operators around it."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.place = {op.id: index for index, op in enumerate(trace.ops) if op.id is not None}
        self.optimizer = Union(s.interval for s in trace.annotations if s.name.startswith("Optimizer.step"))

    def of(self, op: Op) -> str | None:
        """The account of an operator of this trace; None where the operator has no id."""
        return self.at(self.place[op.id]) if op.id in self.place else None

    def at(self, index: int) -> str:
        """The account of the operator at an index of `Trace.ops`."""
        op = self.trace.ops[index]
        around = [self.trace.ops[caller].name for caller in callers(self.trace, index)]
        chain = [_roles(name) for name in (op.name, *around)]
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
class _Roles:
    """Roles in a step that an operator's name reveals."""

    compiles: bool
    attends: bool
    goes_back: bool
    only_forward: bool


@cache
def _roles(name: str) -> _Roles:
    return _Roles(
        compiles=bool(_COMPILING.match(name)),
        attends="attention" in name.lower(),
        goes_back=name.startswith(BACKWARD),
        only_forward=bool(_FORWARD_ONLY.match(name)),
    )


def _recomputes(chain: list[_Roles]) -> bool:
    """Whether a forward operator runs inside a backward function, as under gradient checkpointing."""
    inside = next((place for place, word in enumerate(chain) if word.goes_back), None)
    return inside is not None and any(word.only_forward for word in chain[:inside])


def _copy_kind(op: Op, around: list[str]) -> str | None:
    """The account of an operator that copies; None for other operators, and for a copy inside other work.

    A cast always has its own account: autocast casts inside the operator that it prepares.
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
    """Exposed copies by kind: `exposed_us` is divided in proportion to each kind's own time."""
    sums, kinds = defaultdict[str, Account](Account), Kinds(trace)
    for copy in trace.copies:
        sums[copy_account(copy, kinds)].add(copy.kind, copy.duration)
    whole = sum(account.us for account in sums.values())
    steps = len(trace.steps)
    return {
        name: account.per_step(steps, exposed_us * steps / whole if whole else 0.0) for name, account in sums.items()
    }


def copy_account(copy: Copy, kinds: Kinds) -> str:
    """The account of a copy.

    A copy within the device belongs to the account of its operator. Any other account names the copy's direction, and
    pageable host memory.

    kinds: accounts of the operators of the copy's trace
    """
    if copy.kind == "DtoD" and copy.op is not None and (name := kinds.of(copy.op)) is not None:
        return name
    return ("pageable " if copy.pageable else "") + _COPIES.get(copy.kind, "fills")


def _gaps(trace: Trace, split: Breakdown) -> dict[str, Account]:
    """Gaps of the breakdown; compilation, operators on the host and long Python are taken out of the dispatch gaps."""
    steps, gaps = len(trace.steps), {name: Account(split.us(name)) for name in GAPS}
    busy = Union([*(k.interval for k in trace.kernels), *(c.interval for c in trace.copies)])
    traced = sum(end - start for start, end in busy.gaps(*trace.window)) / steps
    traced -= split.us("launch_gap") + split.us("other")
    scale = split.host_late * split.wall_us / traced if traced > 0 else 0.0  # tracing slows the host
    left = split.us("dispatch")
    spans_of = {COMPILATION: compiling(trace), HOST_OPERATORS: on_host(trace), PYTHON: long_python(trace)}
    for name, spans in spans_of.items():
        idle = sum(end - start - busy.within(start, end) for start, end in spans) / steps
        us = min(left, scale * idle)
        gaps[name] = Account(us, len(list(spans)) / steps)
        left -= us
    return {**gaps, "dispatch": Account(left, split.launches or 0.0)}


def compiling(trace: Trace) -> Union:
    """When torch.compile compiled; torch marks this as a range or, in other versions, as an operator."""
    return Union(span.interval for span in (*trace.annotations, *trace.ops) if _COMPILING.match(span.name))


def on_host(trace: Trace) -> Union:
    """When operators of a step with a GPU computed on the host for at least `LONG_US`, without a CUDA call."""
    inside: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for op in trace.ops:
        inside[op.parent].append(op.interval)
    calls = Union(call.interval for call in trace.api)
    spans = []
    compilation = compiling(trace)
    for index, op in enumerate(trace.ops):
        if op.self_us >= LONG_US and not _calls_python(op) and not compilation.holds(op.start):
            own = Union([*inside[index], *calls.overlapping(op.start, op.end)]).gaps(op.start, op.end)
            spans += [gap for gap in own if gap[1] - gap[0] >= LONG_US]
    return Union(spans)


def _calls_python(op: Op) -> bool:
    """Whether the operator's own time is Python: of an autograd function, or of the entry into compiled code."""
    return "::" not in op.name or op.name.startswith(BACKWARD) or category(op.name) in ("autograd", "compiled")


def long_python(trace: Trace) -> Union:
    """When the stepping thread was in no operator, CUDA call or loader for at least `LONG_US`.

    With a GPU, Python inside autograd functions counts too; on a CPU it is time of operators.
    """
    known = Union(
        [
            *(op.interval for op in trace.ops if not (trace.has_gpu and _calls_python(op))),
            *(call.interval for call in trace.api),
            *(s.interval for s in trace.annotations if s.name.startswith("enumerate(DataLoader")),
            *compiling(trace),
        ]
    )
    spans = []
    for step in trace.steps:
        spans += [gap for gap in known.gaps(step.start, step.end) if gap[1] - gap[0] >= LONG_US]
    return Union(spans)


def _of_cpu(trace: Trace, split: Breakdown) -> dict[str, Account]:
    """Operators' own time on the host; time outside operators and in the loader comes from the breakdown."""
    steps, kinds, sums = len(trace.steps), Kinds(trace), defaultdict[str, Account](Account)
    for index, op in enumerate(trace.ops):
        sums[kinds.at(index)].add(op.name, op.self_us)
    own = sum(account.us for account in sums.values()) / steps
    outside, loading = split.us(OUTSIDE), split.us("data_loading")
    inside = split.wall_us - outside - loading
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
        OUTSIDE: Account(outside - long_us - compile_us, split.ops),
    }
