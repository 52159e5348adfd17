"""What bounds a kernel: memory, arithmetic, or neither. Judged against this device's measured ceilings.

A trace has the shapes and dtypes that went into a kernel's operator, neither its outputs nor addresses. So outputs
are estimated (the broadcast of the inputs, m×n of a GEMM), the same tensor given twice counts twice, and caches
are not seen. Where even that would be a guess, the kernel stays unclassified.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from ast import literal_eval
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from math import prod

from torch.utils.flop_counter import conv_flop_count, sdpa_backward_flop_count, sdpa_flop_count

from optexp.measurement.floor import float32_rate
from optexp.records.profile import Calibration
from optexp.trace import Kernel, Op, Trace

CLASSES = ("memory_bound", "compute_bound", "latency_bound", "unclassified")

LATENCY = 0.6  # below this share of both ceilings, neither bounds the kernel; above, the nearer one does
SHORT_US = 10.0  # below, a kernel's start and end weigh as much as its work

_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2}  # others: 1
_MATRIX = {"aten::mm": 0, "aten::bmm": 0, "aten::addmm": 1, "aten::baddbmm": 1, "aten::_addmm_activation": 1}
_CONVOLUTIONS = {  # where their arguments stride, padding and dilation are
    "aten::cudnn_convolution": (3, 2, 4),
    "aten::cudnn_convolution_relu": (3, 4, 5),
    "aten::mkldnn_convolution": (4, 3, 5),
    "aten::_conv_depthwise2d": (4, 5, 6),
}
_ATTENTION = {  # where a mask would be told that leaves part of the work out, and what tells that there is none
    "aten::_efficient_attention_forward": (9, "0"),
    "aten::_efficient_attention_backward": (14, "0"),
    "aten::_flash_attention_forward": (8, "False"),
    "aten::_flash_attention_backward": (11, "False"),
}
# Names declare GEMMs: `linear` in a kernel's name, `_gemm` at the end of a shared function or of a source of CUDA C++.
_OUR_GEMMS = re.compile(r"optexp\.(\w*linear\w*_forward$|\w+_gemm(\.|$))")
_SHAPE_KEEPING = re.compile(
    r"add|sub|rsub|mul|div|neg|reciprocal|abs|sign|pow|square|r?sqrt|exp2?|log|log1p|erf|sin|cos|relu|elu|mish"
    r"|(threshold|gelu|silu|tanh|sigmoid|leaky_relu|hardtanh|softplus)(_backward)?|clamp(_min|_max)?|maximum|minimum"
    r"|where|lerp|addcmul|addcdiv|masked_fill|copy|fill|zero|eq|ne|lt|le|gt|ge|logical_\w+|bitwise_\w+|floor|ceil|round"
    r"|_(log_)?softmax(_backward_data)?|native_(layer_norm|dropout)(_backward)?|bernoulli"
)
_REDUCING = re.compile(r"sum|mean|amax|amin|max|min|std|var|prod|any|all|norm|linalg_vector_norm|mse_loss")


def kernel_classes(trace: Trace, calibration: Calibration | None, beside: Trace | None = None) -> dict[str, float]:
    """GPU time of all kernels by class, in µs over all steps.

    Inside a graph no operator is known: there a kernel has the class that the same launch has in the trace `beside`.
    """
    seen = {} if beside is None else {_launch(kernel): found for kernel, found in _classed(beside, calibration)}
    classes = dict.fromkeys(CLASSES, 0.0)
    for kernel, found in _classed(trace, calibration):
        classes[seen.get(_launch(kernel), found) if kernel.in_graph else found] += kernel.duration
    return classes


def _classed(trace: Trace, calibration: Calibration | None) -> Iterator[tuple[Kernel, str]]:
    by_op: dict[int, list[Kernel]] = defaultdict(list)
    for kernel in trace.kernels:
        if kernel.op is None or kernel.op.id is None or kernel.in_graph or calibration is None:
            yield kernel, _by_launch(kernel, trace.multiprocessors)
        else:
            by_op[kernel.op.id].append(kernel)
    for kernels in by_op.values():  # several kernels of one operator share its work
        op = kernels[0].op
        assert op is not None
        assert calibration is not None
        found = _by_work(op, kernels, calibration)
        for kernel in kernels:
            yield kernel, found or _by_launch(kernel, trace.multiprocessors)


def _launch(kernel: Kernel) -> tuple[str, tuple[int, ...], tuple[int, ...]]:
    return kernel.name, kernel.grid, kernel.block


def _by_launch(kernel: Kernel, multiprocessors: int | None) -> str:
    """What can be said without shapes: too few blocks for the card, or a long kernel that makes one pass."""
    blocks = kernel.blocks
    if kernel.duration < SHORT_US and blocks is not None and multiprocessors and blocks < multiprocessors:
        return "latency_bound"
    if kernel.duration >= SHORT_US and _passes().match(kernel.name):
        return "memory_bound"
    return "unclassified"


@cache
def _passes() -> re.Pattern[str]:
    """The names of kernels that read and write once: Inductor's pointwise ones, and ours but for GEMMs."""
    files = pkgutil.iter_modules(importlib.import_module("optexp.kernels").__path__)
    ours = "|".join(file.name for file in files if not re.match(r"_|.*linear", file.name))
    return re.compile(rf"triton_poi_|({ours})_(forward|backward)$")


def _by_work(op: Op, kernels: list[Kernel], calibration: Calibration) -> str | None:
    work = work_of(op)
    if work is None:
        return None
    moved, flops = work
    seconds = sum(kernel.duration for kernel in kernels) / 1e6
    memory = moved / seconds / calibration.bandwidth
    rate = _ceiling(op, kernels, flops / seconds, calibration)
    if flops and not rate:
        return None
    compute = flops / seconds / rate if rate else 0.0
    if max(memory, compute) < LATENCY:
        return "latency_bound"
    return "memory_bound" if memory >= compute else "compute_bound"


def _ceiling(op: Op, kernels: list[Kernel], reached: float, calibration: Calibration) -> float | None:
    """The rate this GEMM is held against. float32 that outruns float32 was done in TensorFloat-32: by our own
    kernels in several TF32 GEMMs, whose flops are counted once."""
    dtype = op.inputs[0][0] if op.inputs else ""
    if dtype == "float32" and _OUR_GEMMS.match(op.name):
        return float32_rate(calibration.matrix)
    rate = calibration.matrix.get(dtype)
    if dtype == "float32" and rate is not None:
        named = any(re.search(r"tf32|s1688", kernel.name) for kernel in kernels)
        if named or reached > 1.1 * rate:
            return calibration.matrix.get("tf32", rate)
    return rate


def work_of(op: Op) -> tuple[float, float] | None:
    """Bytes read and written and floating-point operations of one call; None where the trace does not tell."""
    inputs = op.inputs
    if not inputs or any(dtype == "" for dtype, _ in inputs):
        return None
    read = float(sum(_size(dtype, shape) for dtype, shape in inputs))
    if op.name in _MATRIX:
        matrices = inputs[_MATRIX[op.name] :][:2]
        if len(matrices) < 2:
            return None
        (dtype, left), (_, right) = matrices
        rows_columns = prod(left[:-1]) * right[-1]
        return read + rows_columns * _itemsize(dtype), 2.0 * rows_columns * left[-1]
    if op.written and (op.name in _CONVOLUTIONS or op.name == "aten::convolution_backward"):
        return _convolution(op, read)
    if op.name in _ATTENTION:
        return _attention(op, read)
    if _OUR_GEMMS.match(op.name):
        return read, 2.0 * _multiplied(op)
    if op.name.startswith(("triton_", "optexp.")) and not re.match(r"triton_(tem|mm)", op.name):
        return read, 0.0  # outputs are among the arguments
    name = op.name.removeprefix("aten::")
    plain = name.rstrip("_")
    if _REDUCING.fullmatch(plain):
        return read, 0.0
    if not _SHAPE_KEEPING.fullmatch(plain):
        return None
    if plain in ("copy", "fill", "zero"):  # the first tensor is only written
        return read, 0.0
    if name.endswith("_"):
        return read + _size(*inputs[0]), 0.0
    shape = _broadcast([shape for _, shape in inputs])
    if shape is None:
        return None
    return read + prod(shape) * max(_itemsize(dtype) for dtype, _ in inputs), 0.0


def _multiplied(op: Op) -> float:
    """Multiplications of x·wᵀ by a kernel of ours, each number of x as often as y has columns: x may be given as its
    transpose, and y with more rows, of whole tiles, for sums in several parts.

    Of the matrices, kernels in Triton are given x, w and y last, those in CUDA C++ x first and y last.
    """
    matrices = [shape for _, shape in op.inputs if len(shape) == 2]
    if len(matrices) < 3:
        return 0
    x, y = matrices[-3 if re.fullmatch(r"optexp\.\w+", op.name) else 0], matrices[-1]
    return prod(x) * y[1]


def _convolution(op: Op, read: float) -> tuple[float, float] | None:
    size, (first, second) = _itemsize(op.inputs[0][0]), (shape for _, shape in op.inputs[:2])
    if op.name in _CONVOLUTIONS:
        stride, padding, dilation = (literal_eval(op.written[place]) for place in _CONVOLUTIONS[op.name])
        dimensions = zip(first[2:], second[2:], stride, padding, dilation, strict=True)
        out = [first[0], second[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in dimensions)]
        return read + prod(out) * size, conv_flop_count(list(first), list(second), out)
    if op.written[7] == "True":  # transposed
        return None
    weight, made = op.inputs[2][1], literal_eval(op.written[10])[:2]
    moved = sum(prod(shape) * size for shape, wanted in zip((second, weight), made, strict=True) if wanted)
    return read + moved, sum(made) * conv_flop_count(list(second), list(weight), list(first))


def _attention(op: Op, read: float) -> tuple[float, float] | None:
    place, unmasked = _ATTENTION[op.name]
    if op.written[place : place + 1] != (unmasked,) or any(len(shape) != 4 for _, shape in op.inputs[:3]):
        return None
    back = op.name.endswith("backward")
    # (batch, sequence, heads, width) here, and torch counts (batch, heads, sequence, width)
    shapes = [(b, h, s, d) for _, (b, s, h, d) in op.inputs[: 4 if back else 3]]
    size = _itemsize(op.inputs[0][0])
    if back:
        return read + sum(prod(shape) for shape in shapes[1:]) * size, sdpa_backward_flop_count(*shapes)
    (b, h, s, _), width = shapes[0], shapes[2][3]
    return read + b * h * s * width * size, sdpa_flop_count(*shapes)


def matrix_flop(trace: Trace) -> float:
    """Floating-point operations in the GEMMs of a step; those in graphs and fused kernels are not seen."""
    works = (work_of(op) for op in trace.ops if op.name in _MATRIX)
    return sum(work[1] for work in works if work is not None) / len(trace.steps)


def _itemsize(dtype: str) -> int:
    return _BYTES.get(dtype, 1)


def _size(dtype: str, shape: tuple[int, ...]) -> int:
    return prod(shape) * _itemsize(dtype)


def _broadcast(shapes: list[tuple[int, ...]]) -> tuple[int, ...] | None:
    rank = max(len(shape) for shape in shapes)
    padded = [(1,) * (rank - len(shape)) + shape for shape in shapes]
    result = tuple(max(sizes) for sizes in zip(*padded, strict=True))
    fits = all(size in (1, whole) for shape in padded for size, whole in zip(shape, result, strict=True))
    return result if fits else None
