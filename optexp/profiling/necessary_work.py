"""Work of a step that no program can leave out: bytes of inputs and state, and floating-point operations of GEMMs.

A step, recorded under fake tensors, is a graph of values. Only work that every honest program has to do is counted. One
rule for each known way to do less:

- Dead code, and values of an earlier step: an operation counts where a result of the step depends on it, and where it
  depends on the batch or on parameters that training changes. A constant result may be cached.
- Fusion: intermediate values count no bytes.
- Sparsity: zeros and repeated rows may be skipped. A selection (index, embedding, where, mask, slice, and any unknown
  operator) makes its inputs partly needed and its result structured. Work on these does not count, nor does work on an
  operand that is multiplied by such a result. Attention mixes rows: its result is unstructured again.
- Reassociation: x·A·B may be computed as x·(A·B), which has n² fewer free numbers for a width n between A and B. So n²
  is subtracted from a GEMM whose result meets no nonlinearity before the next GEMM. A GEMM whose result is only summed
  counts nothing. The sum over k counts no more terms than the ranks of both operands.
- Transforms of convolutions (Winograd, FFT): one multiplication for each output element, input and output channel.
  Strassen's algorithm saves an eighth of a GEMM, which the margin of the bound covers.
- Symmetry: a GEMM of a value with itself counts half. A causal mask leaves half of an attention; any other mask
  may leave nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum, IntEnum, auto
from math import inf


class Need(IntEnum):
    """How much of a value the step's results need."""

    NONE = 0
    PART = 1  # some elements, unknown which
    SUM = 2  # a linear reduction, in which every element takes part
    LINEAR = 3  # every element, but its GEMM may be merged with the next one
    FULL = 4  # every element individually


class Kind(Enum):
    """How a result follows from its operands."""

    LINEAR = auto()  # element by element, or a linear reduction
    PRODUCT = auto()  # of operands, element by element
    NONLINEAR = auto()  # of one operand, element by element or along rows
    GEMM = auto()
    SELECTION = auto()  # and everything that is not known


@dataclass(eq=False)
class Value:
    """The content of one storage between two writes.

    rank:   most independent terms in a sum over it: infinite for unstructured data, 0 for unknown structure
    varies: whether it changes from step to step
    leaf:   its origin: "input", "parameter" or "state"; "" for a result of the step
    parts:  reads as (period, offset, length, need): `length` of every `period` elements
    root:   need of the value as a result of the step itself
    selected: whether a selection reads it
    width:  most terms that a GEMM sums over values that follow linearly from it
    """

    numel: int
    itemsize: int
    rank: float = inf
    varies: bool = True
    leaf: str = ""
    parts: list[tuple[int, int, int, Need]] = field(default_factory=list)
    root: Need = Need.NONE
    selected: bool = False
    width: int = 0
    every_row: bool = False  # gradient of a loss with one entry in each row
    mixes: bool = False  # weights of an attention

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    def covered(self, least: Need) -> float:
        """Share of its elements whose need is `least` or more."""
        if self.root >= least:
            return 1.0
        best = 0.0
        for period in {part[0] for part in self.parts}:
            spans = sorted((o, o + n) for p, o, n, need in self.parts if p == period and need >= least)
            reached = total = 0
            for start, end in spans:
                total += max(0, end - max(start, reached))
                reached = max(reached, end)
            best = max(best, total / period)
        return best

    @property
    def need(self) -> Need:
        whole = (need for need in (Need.FULL, Need.LINEAR, Need.SUM) if self.covered(need) >= 1.0)
        some = Need.PART if self.parts else Need.NONE
        return next(whole, some)


@dataclass(frozen=True)
class Read:
    """An operand: a view of a value.

    layout: (period, offset, length); None where it is no run of elements that repeats
    numel:  elements of the view;  expanded: it repeats elements of the value
    """

    value: Value
    numel: int
    layout: tuple[int, int, int] | None
    expanded: bool = False

    @property
    def rank(self) -> float:
        return 0.0 if self.expanded else self.value.rank

    @property
    def nbytes(self) -> float:
        """Bytes of the value that the view covers, at least."""
        period, _, length = self.layout or (1, 0, 0)
        return 0.0 if self.expanded else self.value.nbytes * length / period

    def needed(self, need: Need, width: int) -> None:
        """Record a result's need of this operand; `width`: terms of the next sum over it."""
        if need is Need.NONE:
            return
        self.value.width = max(self.value.width, width)
        period, offset, length = self.layout or (self.value.numel, 0, 0)
        self.value.parts.append((period, offset, length, need if self.layout and not self.expanded else Need.PART))


@dataclass(frozen=True)
class Gemm:
    """One GEMM inside an operation.

    flops:   after all savings except merging with another GEMM
    result:  index among the results of its operation
    inner:   terms of its sums
    dtype:   of the arithmetic
    weights: bytes of parameters that need not be read where it is merged with the next GEMM
    """

    flops: float
    result: int
    inner: int
    dtype: str
    weights: float = 0.0


@dataclass(frozen=True)
class Operation:
    """An operator of the step, in the order of execution."""

    name: str
    kind: Kind
    reads: Sequence[Read]
    results: Sequence[Value]
    gemms: Sequence[Gemm] = ()
    factors: Sequence[Read] = ()  # operands that are multiplied with each other


@dataclass(frozen=True)
class Necessary:
    """Least bytes and flops of a step; see `optexp.records.roofline.StepWork`."""

    input_bytes: float
    kept_bytes: float
    flops: dict[str, float]


def layout(sizes: Sequence[int], strides: Sequence[int], offset: int, whole: int) -> tuple[tuple[int, int, int], bool]:
    """A view as (period, offset, length) of runs in a storage of `whole` elements, and whether it repeats elements.

    Its length is 0 for a view that is no repeated run.
    """
    expanded = any(stride == 0 and size > 1 for size, stride in zip(sizes, strides, strict=True))
    steps = sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size > 1 and stride)
    runs: list[list[int]] = []  # [stride, count], merged where one run follows the other
    for stride, size in steps:
        if runs and stride == runs[-1][0] * runs[-1][1]:
            runs[-1][1] *= size
        else:
            runs.append([stride, size])
    if not runs:
        return (whole, offset, 1), expanded
    if runs[0][0] != 1:
        runs.insert(0, [1, 1])
    length = runs[0][1]
    if len(runs) == 1:
        return (whole, offset, length), expanded
    period, count = runs[1]
    fits = len(runs) == 2 and length <= period and period * count == whole and offset % period + length <= period
    return (period, offset % period, length if fits else 0), expanded


def combined_rank(kind: Kind, additive: bool, reads: Sequence[Read], numel: int) -> float:
    """Rank of the result of an operator on elements; operands of fewer elements than the result are broadcast."""
    full = [read for read in reads if read.numel >= numel]
    if kind is Kind.SELECTION or not full:
        return 0.0
    if additive:
        return sum(read.rank for read in full if read.value.varies)
    least = min(read.rank for read in full)
    return inf if least and kind is Kind.NONLINEAR else least


def necessary(
    operations: Sequence[Operation],
    results: Iterable[Read],
    gradients: Iterable[Value],
    mutated: Iterable[tuple[Value, Value]],
    leaves: Iterable[Value],
) -> Necessary:
    """Walk back from the results of a step, and count the work that they need.

    Args:
        results: Outputs, which may be views.
        gradients: Gradients that the step leaves behind.
        mutated: Values, before and after the step, of parameters, buffers and optimizer state that it changes.
        leaves: Inputs, parameters and state before the step.
    """
    outputs, left, changed = list(results), list(gradients), list(mutated)
    for value in (*left, *(after for _, after in changed)):
        value.root = Need.FULL
    for read in outputs:
        read.needed(Need.FULL, 0)
    flops: dict[str, float] = {}
    merged, weights = 0.0, 0.0
    used: dict[int, Value] = {}  # parameters that a counted GEMM reads
    made: set[int] = set()
    for operation in reversed(operations):
        needs = [result.need for result in operation.results]
        if max(needs, default=Need.NONE) is Need.NONE:
            continue
        made |= {id(result) for result in operation.results if result.varies}
        propagate(operation, needs)
        for gemm in operation.gemms:
            if (need := needs[gemm.result]) < Need.LINEAR:
                continue
            flops[gemm.dtype] = flops.get(gemm.dtype, 0.0) + gemm.flops
            used |= {id(read.value): read.value for read in operation.reads if read.value.leaf == "parameter"}
            if need is Need.LINEAR:
                result = operation.results[gemm.result]
                merged += 2.0 * result.numel * result.width
                weights += gemm.weights
    total = sum(flops.values())
    kept_share = max(0.0, 1 - merged / total) if total else 0.0
    written = {id(read.value): read.nbytes for read in outputs if id(read.value) in made}
    written |= {id(value): value.nbytes for value in left if id(value) in made and value.rank}
    written |= {id(after): after.nbytes for _, after in changed if not after.selected}
    once = {id(before) for before, _ in changed}
    weighed = sum(v.nbytes * v.covered(Need.SUM) for key, v in used.items() if key not in once)
    inputs = sum(v.nbytes * v.covered(Need.SUM) for v in leaves if v.leaf == "input")
    kept = max(0.0, weighed - weights) + sum(written.values())
    return Necessary(inputs, kept, {dtype: count * kept_share for dtype, count in flops.items() if count})


def propagate(operation: Operation, needs: Sequence[Need]) -> None:
    """Record an operation's needs of its operands, given the needs of its results."""
    gemm_width = max((gemm.inner for gemm in operation.gemms), default=0)
    for read in operation.reads:
        others = [factor for factor in operation.factors if factor is not read]
        beside_structured = any(other.numel > 1 and not other.rank and not other.value.every_row for other in others)
        if beside_structured and read in operation.factors:
            read.needed(Need.PART, width=0)  # zeros or repeated rows of the other factor leave an unknown part
            continue
        beside_dense = any(other.value.varies and other.rank == inf and other.numel >= read.numel for other in others)
        need = max(
            of_operand(operation.kind, need_of_result, read, result, beside_dense)
            for need_of_result, result in zip(needs, operation.results, strict=True)
        )
        read.needed(need, width=gemm_width or max(result.width for result in operation.results))


def of_operand(kind: Kind, need: Need, read: Read, result: Value, beside_dense: bool) -> Need:
    """The need that one result, itself of need `need`, has of one operand.

    beside_dense: another operand of at least its size holds unstructured data that varies
    """
    if need <= Need.PART or kind is Kind.SELECTION:
        return min(need, Need.PART)
    if kind is Kind.NONLINEAR:
        return Need.FULL
    if kind is Kind.GEMM:
        return Need.LINEAR if need >= Need.LINEAR else Need.SUM
    if kind is Kind.PRODUCT and need >= Need.LINEAR and beside_dense:
        return Need.FULL
    return need if result.numel >= read.numel else Need.SUM
