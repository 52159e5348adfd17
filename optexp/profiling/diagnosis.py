"""Bottlenecks of a step, by name; strategies declare which of their causes they answer (`Strategy.remedies`).

Each bottleneck is one function of a trace and its breakdown; `BOTTLENECKS` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from optexp.profiling.breakdown import OUTSIDE, Breakdown
from optexp.profiling.explanation import DISTORTED, percent
from optexp.records.profile import Bottleneck
from optexp.support.units import duration
from optexp.trace import Trace

_SMALL_KERNEL_US, _MANY_KERNELS = 10.0, 20
_SMALL_OP_US, _MANY_OPS = 20.0, 50
_INSIDE = {"DtoD", "memset"}  # kinds of copies

Rule = Callable[[Trace, Breakdown], Bottleneck | None]


def diagnose(trace: Trace, breakdown: Breakdown) -> list[Bottleneck]:
    """All bottlenecks that the profile shows, largest share first, with their causes and advice in plain words."""
    if breakdown.busy is None and (breakdown.stretched or 0.0) > DISTORTED:
        return []
    found = _shown(BOTTLENECKS["cpu" if breakdown.busy is None else "gpu"], trace, breakdown)
    return sorted(found, key=lambda bottleneck: -bottleneck.share)


def _shown(rules: Iterable[Rule], trace: Trace, b: Breakdown) -> list[Bottleneck]:
    return [bottleneck for rule in rules if (bottleneck := rule(trace, b)) is not None]


# --- a step with work on a GPU ----------------------------------------------------------------------------------


def cpu_bottleneck(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """The GPU waits for data, after a synchronisation, or for Python, and not for the launches of small kernels."""
    loading, waiting, dispatching = b.terms["data_loading"], b.terms["synchronisation"], b.terms["dispatch"]
    outpaced = (b.enqueue or 0.0) >= 0.9 and (b.median_kernel_us or 0.0) >= _SMALL_KERNEL_US
    if b.host_late < 0.2 or not (loading >= 0.05 or waiting >= 0.05 or outpaced):
        return None
    shares = {"for data": loading, "after a synchronisation": waiting, "for Python to dispatch": dispatching}
    reasons = [f"{percent(share)} {what}" for what, share in shares.items() if share >= 0.05]
    words, causes = _faster_loading(trace) if loading >= 0.05 else ((), ())
    if waiting >= 0.05:
        words = (*words, "remove what waits for the GPU (.item(), .cpu(), printing a loss)")
    if dispatching >= max(loading, waiting):  # else it is not the launches that are late
        causes = ("dispatch", *causes)
    why = f"the GPU waits for the host {percent(b.host_late)} of the step ({', '.join(reasons)})"
    return Bottleneck("cpu_bottleneck", b.host_late, why, words, causes)


def many_small_kernels(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """Kernels that take no longer than their launches."""
    kernels, median_us = b.kernels or 0.0, b.median_kernel_us or 0.0
    small = kernels >= _MANY_KERNELS and median_us < _SMALL_KERNEL_US
    if not small or (b.gaps < 0.2 and (b.enqueue or 0.0) < 0.8):
        return None
    why = (
        f"{kernels:.0f} kernels a step, {duration(median_us / 1e6)} each (median),"
        f" and the GPU idle {percent(b.gaps)} of the step between them"
    )
    return Bottleneck("many_small_kernels", b.gaps, why, causes=("many_small_kernels",))


def memory_copy(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """Copies of a batch over the bus, which other work may hide, or within the device, which no step needs."""
    exposed, pageable = b.terms["exposed_copies"], b.pageable or 0.0
    if exposed < 0.10 and pageable < 0.05:
        return None
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


def memory_bound(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """Half of the kernels' time goes to those that only move data."""
    share = b.terms["memory_bound"]
    if (b.busy or 0.0) < 0.8 or share < 0.5 * b.kernel_share:
        return None
    why = f"kernels that only move data through memory take {percent(share)} of the step"
    return Bottleneck("memory_bound", share, why, causes=("memory_bound",))


def compute_bound(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """Half of the kernels' time goes to those near the card's arithmetic limit."""
    share = b.terms["compute_bound"]
    if (b.busy or 0.0) < 0.8 or share < 0.5 * b.kernel_share:
        return None
    why = f"products and convolutions near this card's limit take {percent(share)} of the step"
    return Bottleneck("compute_bound", share, why, causes=("compute_bound",))


def gpu_idle(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """The GPU idles, and no other bottleneck explains half of that."""
    busy = b.busy or 0.0
    idle = 1 - busy
    others = _shown((rule for rule in BOTTLENECKS["gpu"] if rule is not gpu_idle), trace, b)
    if busy >= 0.5 or max((other.share for other in others), default=0.0) >= idle / 2:
        return None
    why = f"the GPU does nothing {percent(idle)} of the step, and no single cause explains half of it"
    return Bottleneck("gpu_idle", idle, why, ("look for synchronisations in the trace",), ("gpu_idle",))


# --- a step on the CPU ------------------------------------------------------------------------------------------


def many_small_ops(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """Operators that take no longer than their calls."""
    if not _has_small_ops(b):
        return None
    why = f"{b.ops:.0f} operator calls a step, {duration(_mean_op_us(b) / 1e6)} each: much of that is the calling"
    share = 1 - b.terms.get("matrix", 0.0) - b.terms.get("data_loading", 0.0)
    return Bottleneck("many_small_ops", share, why, causes=("many_small_ops",))


def _has_small_ops(b: Breakdown) -> bool:
    return b.ops >= _MANY_OPS and _mean_op_us(b) < _SMALL_OP_US


def _mean_op_us(b: Breakdown) -> float:
    inside = 1 - b.terms[OUTSIDE] - b.terms.get("data_loading", 0.0)
    return inside * b.wall_us / b.ops if b.ops else 0.0


def matrix_products(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """Half of the step is matrix products."""
    share = b.terms.get("matrix", 0.0)
    if share < 0.5:
        return None
    why = f"matrix products take {percent(share)} of the step"
    return Bottleneck("matrix_products", share, why, causes=("compute_bound",))


def memory_passes(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """Half of the step is passes over memory, each long beside its call."""
    share = sum(b.terms.get(name, 0.0) for name in ("elementwise", "activation", "normalization", "reduction"))
    if share < 0.5 or _has_small_ops(b):
        return None
    why = f"element-wise operators and reductions, each a pass over memory, take {percent(share)} of the step"
    return Bottleneck("memory_passes", share, why, causes=("memory_passes",))


def data_loading(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """The step waits for its DataLoader."""
    share = b.terms.get("data_loading", 0.0)
    if share < 0.2:
        return None
    words, causes = _faster_loading(trace)
    why = f"the step waits for its next batch {percent(share)} of the time"
    return Bottleneck("data_loading", share, why, words, causes)


def outside_ops(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """Half of the step passes outside torch."""
    share = b.terms[OUTSIDE]
    if share < 0.5:
        return None
    why = f"{percent(share)} of the step passes outside torch's operators (Python, data, waiting)"
    return Bottleneck("outside_ops", share, why, ("look at the step's own Python code",))


def one_op(trace: Trace, b: Breakdown) -> Bottleneck | None:
    """One operator takes half of the step."""
    top = trace.top_ops(1)
    if not top or top[0].share < 0.5:
        return None
    return Bottleneck("one_op", top[0].share, f"{top[0].name} takes {percent(top[0].share)} of the step")


def _faster_loading(trace: Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Plain words against waiting for a DataLoader, and causes; a loader that has workers needs other remedies."""
    if any("MultiProcessing" in span.name for span in trace.annotations):
        return ("more DataLoader workers (num_workers, prefetch_factor), or less work for each batch",), ()
    words = "DataLoader(num_workers=…, prefetch_factor=…), so that processes of its own make batches ahead"
    return (words,), ("data_loading",)


BOTTLENECKS: Mapping[str, tuple[Rule, ...]] = {
    "gpu": (cpu_bottleneck, many_small_kernels, memory_copy, memory_bound, compute_bound, gpu_idle),
    "cpu": (many_small_ops, matrix_products, memory_passes, data_loading, outside_ops, one_op),
}
