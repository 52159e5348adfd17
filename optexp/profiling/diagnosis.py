"""What holds a step back, and which strategies go against that."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Sequence
from dataclasses import replace

from optexp.profiling.breakdown import OUTSIDE, Breakdown
from optexp.profiling.explanation import DISTORTED, percent
from optexp.records.profile import Bottleneck, Calibration
from optexp.support.units import duration
from optexp.trace import MATRIX_OPS, Trace

_STRATEGY = "strategy="
_SMALL_KERNEL_US, _MANY_KERNELS = 10.0, 20
_SMALL_OP_US, _MANY_OPS = 20.0, 50
_INSIDE = {"DtoD", "memset"}  # kinds of copies
_WORKERS = 4  # proposed for a loader that has none, at most
_LOW_PRECISION = {"bfloat16", "float16"}


def diagnose(trace: Trace, breakdown: Breakdown, calibration: Calibration | None = None) -> list[Bottleneck]:
    """All causes that the profile shows, largest share first.

    calibration: the device's measured ceilings; lower precision is proposed on a CPU only where they show it faster
    """
    if breakdown.busy is None and (breakdown.stretched or 0.0) > DISTORTED:
        return []
    found = _on_cpu(trace, breakdown) if breakdown.busy is None else _on_gpu(trace, breakdown, breakdown.busy)
    done = {"amp"} if _LOW_PRECISION & trace.op_dtypes(MATRIX_OPS).keys() else set()
    if breakdown.graph_launches:
        done.add("cuda_graph")
    if breakdown.busy is None and calibration is not None and not _faster_in_low_precision(calibration):
        done.add("amp")

    ranked = sorted(found, key=lambda bottleneck: -bottleneck.share)
    return [replace(b, try_=tuple(text for text in b.try_ if parse(text)[0] not in done)) for b in ranked]


def narrowed(bottlenecks: Iterable[Bottleneck], possible: Container[str]) -> list[Bottleneck]:
    """The same causes, with plain words and those strategies that are possible."""
    return [replace(b, try_=tuple(t for t in b.try_ if parse(t)[0] is None or t in possible)) for b in bottlenecks]


def suggestion(bottlenecks: Iterable[Bottleneck], stack: Sequence[str], without: Container[str] = ()) -> str | None:
    """The best remedy of the largest bottleneck that has one, in one sentence; None when nothing follows.

    A strategy that is not in the stack yet comes before plain words.

    without: strategies that made things worse
    """
    for bottleneck in bottlenecks:
        named = [(text, *parse(text)) for text in bottleneck.try_]
        for _, name, options in named:
            if name is not None and name not in stack and name not in without:
                choice = f"[{','.join((*stack, name))}]" if stack else name
                return " ".join([f"{_STRATEGY}{choice}", *options]) + f": {bottleneck.why}"
        for text, name, _ in named:
            if name is None:
                return f"{text}: {bottleneck.why}"
    return None


def parse(text: str) -> tuple[str | None, list[str]]:
    """The strategy that a piece of advice names (None for plain words), and its options as they are typed."""
    if not text.startswith(_STRATEGY):
        return None, []
    name, *options = text.removeprefix(_STRATEGY).split()
    return name, options


def _lower_precision(trace: Trace) -> tuple[str, ...]:
    """amp, where it could find something to lower: inside a graph no operator is visible."""
    hidden = any(kernel.in_graph for kernel in trace.kernels)
    return ("strategy=amp",) if hidden or trace.op_dtypes(MATRIX_OPS) else ()


def _faster_in_low_precision(calibration: Calibration) -> bool:
    """Whether a product in bfloat16 is: processors without such units emulate it."""
    return calibration.matrix.get("bfloat16", 0.0) > calibration.matrix.get("float32", 0.0)


def _loader_advice(trace: Trace) -> tuple[str, ...]:
    """Against waiting for a DataLoader: workers where it has none, else what makes each batch cheaper."""
    if any("MultiProcessing" in span.name for span in trace.annotations):
        return ("more DataLoader workers (num_workers, prefetch_factor), or less work for each batch",)
    workers = max(1, min(_WORKERS, len(os.sched_getaffinity(0)) - 1))
    return (
        f"strategy=pinned_memory strategy.pinned_memory.workers={workers}",
        "DataLoader(num_workers=…, prefetch_factor=…), so that processes of its own make batches ahead",
    )


def _copies(trace: Trace, b: Breakdown, pageable: float) -> Bottleneck:
    """Of a batch on its way over the bus, which others may hide, or within the device, which nobody should ask for."""
    exposed = b.terms["exposed_copies"]
    why = f"copies that no kernel hides take {percent(exposed)} of the step"
    inside = sum(copy.duration for copy in trace.copies if copy.kind in _INSIDE)
    remedies: tuple[str, ...] = ("strategy=prefetch", "strategy=streams strategy.streams.mode=chunks")
    if pageable >= 0.05:
        why += f", {percent(pageable)} from or to pageable memory"
        remedies = ("strategy=pinned_memory", *remedies)
    elif inside > sum(copy.duration for copy in trace.copies) / 2:
        why += " (within the device: a graph reads its batch from memory of its own)" if b.graph_launches else ""
        remedies = () if b.graph_launches else ("look in the trace for what copies within the device",)
    return Bottleneck("memory_copy", max(exposed, pageable), why, remedies)


def _on_gpu(trace: Trace, b: Breakdown, busy: float) -> list[Bottleneck]:
    found = []
    kernels, median_us = b.kernels or 0.0, b.median_kernel_us or 0.0
    enqueue, pageable = b.enqueue or 0.0, b.pageable or 0.0
    loading, waiting, dispatching = b.terms["data_loading"], b.terms["synchronisation"], b.terms["dispatch"]
    small = kernels >= _MANY_KERNELS and median_us < _SMALL_KERNEL_US
    outpaced = enqueue >= 0.9 and median_us >= _SMALL_KERNEL_US

    if b.host_late >= 0.2 and (loading >= 0.05 or waiting >= 0.05 or outpaced):
        shares = {"for data": loading, "after a synchronisation": waiting, "for Python to dispatch": dispatching}
        reasons = [f"{percent(share)} {what}" for what, share in shares.items() if share >= 0.05]
        advice = list(_loader_advice(trace)) if loading >= 0.05 else []
        advice += ["remove what waits for the GPU (.item(), .cpu(), printing a loss)"] if waiting >= 0.05 else []
        if dispatching >= max(loading, waiting):  # else it is not the launches that are late
            advice = ["strategy=fusion", "strategy=cuda_graph", *advice]
        found.append(
            Bottleneck(
                "cpu_bottleneck",
                b.host_late,
                f"the GPU waits for the host {percent(b.host_late)} of the step ({', '.join(reasons)})",
                tuple(advice),
            )
        )
    if small and (b.gaps >= 0.2 or enqueue >= 0.8):
        found.append(
            Bottleneck(
                "many_small_kernels",
                b.gaps,
                f"{kernels:.0f} kernels a step, {duration(median_us / 1e6)} each (median),"
                f" and the GPU idle {percent(b.gaps)} of the step between them",
                ("strategy=cuda_graph", "strategy=fusion", "strategy=fused_optimizer"),
            )
        )
    if b.terms["exposed_copies"] >= 0.10 or pageable >= 0.05:
        found.append(_copies(trace, b, pageable))
    memory, compute = b.terms["memory_bound"], b.terms["compute_bound"]
    if busy >= 0.8 and memory >= 0.5 * b.kernel_share:
        found.append(
            Bottleneck(
                "memory_bound",
                memory,
                f"kernels that only move data through memory take {percent(memory)} of the step",
                ("strategy=fusion", *_lower_precision(trace), "strategy=inplace"),
            )
        )
    if busy >= 0.8 and compute >= 0.5 * b.kernel_share:
        found.append(
            Bottleneck(
                "compute_bound",
                compute,
                f"products and convolutions near this card's limit take {percent(compute)} of the step",
                ("strategy=amp", "strategy=fusion strategy.fusion.mode=max-autotune"),
            )
        )
    idle = 1 - busy
    if busy < 0.5 and max((f.share for f in found), default=0.0) < idle / 2:
        found.append(
            Bottleneck(
                "gpu_idle",
                idle,
                f"the GPU does nothing {percent(idle)} of the step, and no single cause explains half of it",
                ("look for synchronisations in the trace", "strategy=streams", "strategy=cuda_graph"),
            )
        )
    return found


def _on_cpu(trace: Trace, b: Breakdown) -> list[Bottleneck]:
    found = []
    matrix = b.terms.get("matrix", 0.0)
    passes = sum(b.terms.get(name, 0.0) for name in ("elementwise", "activation", "normalization", "reduction"))
    loading = b.terms.get("data_loading", 0.0)
    inside = 1 - b.terms[OUTSIDE] - loading
    mean_us = inside * b.wall_us / b.ops if b.ops else 0.0
    small = b.ops >= _MANY_OPS and mean_us < _SMALL_OP_US
    if small:
        found.append(
            Bottleneck(
                "many_small_ops",
                1 - matrix - loading,
                f"{b.ops:.0f} operator calls a step, {duration(mean_us / 1e6)} each: much of that is the calling",
                ("strategy=fusion",),
            )
        )
    if matrix >= 0.5:
        found.append(
            Bottleneck(
                "matrix_products",
                matrix,
                f"matrix products take {percent(matrix)} of the step",
                ("strategy=amp", "strategy=fusion strategy.fusion.mode=max-autotune"),
            )
        )
    if passes >= 0.5 and not small:
        found.append(
            Bottleneck(
                "memory_passes",
                passes,
                f"element-wise operators and reductions, each a pass over memory, take {percent(passes)} of the step",
                ("strategy=fusion", "strategy=inplace"),
            )
        )
    if loading >= 0.2:
        found.append(
            Bottleneck(
                "data_loading",
                loading,
                f"the step waits for its next batch {percent(loading)} of the time",
                _loader_advice(trace),
            )
        )
    if b.terms[OUTSIDE] >= 0.5:
        found.append(
            Bottleneck(
                "outside_ops",
                b.terms[OUTSIDE],
                f"{percent(b.terms[OUTSIDE])} of the step passes outside torch's operators (Python, data, waiting)",
                ("look at the step's own Python code",),
            )
        )
    top = trace.top_ops(1)
    if top and top[0].share >= 0.5:
        found.append(Bottleneck("one_op", top[0].share, f"{top[0].name} takes {percent(top[0].share)} of the step", ()))
    return found
