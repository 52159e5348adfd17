"""The bound of a kernel: memory, arithmetic, or neither, by this device's measured ceilings.

Where a trace does not show the work of an operator (see `optexp.profiling.work`), its kernels stay unclassified.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from optexp.measurement.floor import float32_rate
from optexp.profiling.work import MATRIX, OUR_GEMMS, work_of
from optexp.records.profile import Calibration
from optexp.trace import Kernel, Op, Trace

CLASSES = ("memory_bound", "compute_bound", "latency_bound", "unclassified")

LATENCY = 0.6  # a kernel below this share of both ceilings is latency-bound; else the nearer ceiling bounds it
SHORT_US = 10.0  # in a shorter kernel, start and end take as long as the work


def kernel_classes(trace: Trace, calibration: Calibration | None, beside: Trace | None = None) -> dict[str, float]:
    """GPU time of all kernels by class, in µs over all steps.

    A graph hides operators: a kernel in a graph has the class of the same kernel, grid and block in the trace `beside`.
    """
    seen = {} if beside is None else {kernel.configuration: found for kernel, found in _classed(beside, calibration)}
    classes = dict.fromkeys(CLASSES, 0.0)
    for kernel, found in _classed(trace, calibration):
        classes[seen.get(kernel.configuration, found) if kernel.in_graph else found] += kernel.duration
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


def _by_launch(kernel: Kernel, multiprocessors: int | None) -> str:
    """The class by the launch alone: too few blocks for the card, or a long kernel that is known to make one pass."""
    blocks = kernel.blocks
    if kernel.duration < SHORT_US and blocks is not None and multiprocessors and blocks < multiprocessors:
        return "latency_bound"
    if kernel.duration >= SHORT_US and (_passes().match(kernel.name) or _MOVES.search(kernel.name)):
        return "memory_bound"
    return "unclassified"


_MOVES = re.compile(r"\bCatArrayBatchedCopy")  # kernel of aten::cat, whose inputs have no dtypes in a trace


@cache
def _passes() -> re.Pattern[str]:
    """Names of kernels that read and write once: Inductor's pointwise kernels, and optexp's kernels except GEMMs."""
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
    rate = ceiling(op, kernels, flops / seconds, calibration)
    if flops and not rate:
        return None
    compute = flops / seconds / rate if rate else 0.0
    if max(memory, compute) < LATENCY:
        return "latency_bound"
    return "memory_bound" if memory >= compute else "compute_bound"


def ceiling(op: Op, kernels: list[Kernel], reached: float, calibration: Calibration) -> float | None:
    """The calibrated flop/s that a GEMM is compared with; None where its dtype was not calibrated.

    A float32 GEMM that is faster than float32's ceiling ran in TensorFloat-32. optexp's own kernels compute float32 by
    several TF32 GEMMs, whose flops count once.
    """
    dtype = op.inputs[0][0] if op.inputs else ""
    if dtype == "float32" and OUR_GEMMS.match(op.name):
        return float32_rate(calibration.matrix)
    rate = calibration.matrix.get(dtype)
    if dtype == "float32" and rate is not None:
        named = any(re.search(r"tf32|s1688", kernel.name) for kernel in kernels)
        if named or reached > 1.1 * rate:
            return calibration.matrix.get("tf32", rate)
    return rate


def matrix_flop(trace: Trace) -> float:
    """Floating-point operations in the GEMMs of a step, without GEMMs in graphs and fused kernels."""
    works = (work_of(op) for op in trace.ops if op.name in MATRIX)
    return sum(work[1] for work in works if work is not None) / len(trace.steps)
