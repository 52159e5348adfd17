"""Bottlenecks of a step, by name; strategies declare which of their causes they answer (`Strategy.remedies`)."""

from __future__ import annotations

from optexp.profiling.breakdown import OUTSIDE, Breakdown
from optexp.profiling.explanation import DISTORTED, percent
from optexp.records.profile import Bottleneck
from optexp.support.units import duration
from optexp.trace import Trace

_SMALL_KERNEL_US, _MANY_KERNELS = 10.0, 20
_SMALL_OP_US, _MANY_OPS = 20.0, 50
_INSIDE = {"DtoD", "memset"}  # kinds of copies


def diagnose(trace: Trace, breakdown: Breakdown) -> list[Bottleneck]:
    """All bottlenecks that the profile shows, largest share first, with their causes and advice in plain words."""
    if breakdown.busy is None and (breakdown.stretched or 0.0) > DISTORTED:
        return []
    found = _on_cpu(trace, breakdown) if breakdown.busy is None else _on_gpu(trace, breakdown, breakdown.busy)
    return sorted(found, key=lambda bottleneck: -bottleneck.share)


def _data_loading(trace: Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Plain words against waiting for a DataLoader, and causes; a loader that has workers needs other remedies."""
    if any("MultiProcessing" in span.name for span in trace.annotations):
        return ("more DataLoader workers (num_workers, prefetch_factor), or less work for each batch",), ()
    words = "DataLoader(num_workers=…, prefetch_factor=…), so that processes of its own make batches ahead"
    return (words,), ("data_loading",)


def _copies(trace: Trace, b: Breakdown, pageable: float) -> Bottleneck:
    """Of a batch on its way over the bus, which others may hide, or within the device, which nobody should ask for."""
    exposed = b.terms["exposed_copies"]
    why = f"copies that no kernel hides take {percent(exposed)} of the step"
    inside = sum(copy.duration for copy in trace.copies if copy.kind in _INSIDE)
    words: tuple[str, ...] = ()
    causes: tuple[str, ...] = ("memory_copy",)
    if pageable >= 0.05:
        why += f", {percent(pageable)} from or to pageable memory"
        causes = ("pageable_copy", *causes)
    elif inside > sum(copy.duration for copy in trace.copies) / 2:
        why += " (within the device: a graph reads its batch from memory of its own)" if b.graph_launches else ""
        words = () if b.graph_launches else ("look in the trace for what copies within the device",)
        causes = ()
    return Bottleneck("memory_copy", max(exposed, pageable), why, words, causes)


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
        words, causes = _data_loading(trace) if loading >= 0.05 else ((), ())
        if waiting >= 0.05:
            words = (*words, "remove what waits for the GPU (.item(), .cpu(), printing a loss)")
        if dispatching >= max(loading, waiting):  # else it is not the launches that are late
            causes = ("dispatch", *causes)
        found.append(
            Bottleneck(
                "cpu_bottleneck",
                b.host_late,
                f"the GPU waits for the host {percent(b.host_late)} of the step ({', '.join(reasons)})",
                words,
                causes,
            )
        )
    if small and (b.gaps >= 0.2 or enqueue >= 0.8):
        found.append(
            Bottleneck(
                "many_small_kernels",
                b.gaps,
                f"{kernels:.0f} kernels a step, {duration(median_us / 1e6)} each (median),"
                f" and the GPU idle {percent(b.gaps)} of the step between them",
                causes=("many_small_kernels",),
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
                causes=("memory_bound",),
            )
        )
    if busy >= 0.8 and compute >= 0.5 * b.kernel_share:
        found.append(
            Bottleneck(
                "compute_bound",
                compute,
                f"products and convolutions near this card's limit take {percent(compute)} of the step",
                causes=("compute_bound",),
            )
        )
    idle = 1 - busy
    if busy < 0.5 and max((f.share for f in found), default=0.0) < idle / 2:
        found.append(
            Bottleneck(
                "gpu_idle",
                idle,
                f"the GPU does nothing {percent(idle)} of the step, and no single cause explains half of it",
                ("look for synchronisations in the trace",),
                ("gpu_idle",),
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
                causes=("many_small_ops",),
            )
        )
    if matrix >= 0.5:
        found.append(
            Bottleneck(
                "matrix_products",
                matrix,
                f"matrix products take {percent(matrix)} of the step",
                causes=("compute_bound",),
            )
        )
    if passes >= 0.5 and not small:
        found.append(
            Bottleneck(
                "memory_passes",
                passes,
                f"element-wise operators and reductions, each a pass over memory, take {percent(passes)} of the step",
                causes=("memory_passes",),
            )
        )
    if loading >= 0.2:
        words, causes = _data_loading(trace)
        found.append(
            Bottleneck(
                "data_loading",
                loading,
                f"the step waits for its next batch {percent(loading)} of the time",
                words,
                causes,
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
        found.append(Bottleneck("one_op", top[0].share, f"{top[0].name} takes {percent(top[0].share)} of the step"))
    return found
