"""Bottlenecks of a step, by name; strategies declare which of their causes they answer (`Strategy.remedies`).

Each bottleneck is one function of a trace and its breakdown; `BOTTLENECKS` lists them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import chain

from optexp.profiling.breakdown import OUTSIDE, Breakdown
from optexp.profiling.explanation import DISTORTED, percent
from optexp.profiling.view import View
from optexp.profiling.waste import waste
from optexp.records.profile import Bottleneck
from optexp.support.units import duration
from optexp.trace import Trace

_SMALL_KERNEL_US, _MANY_KERNELS = 10.0, 20
_SMALL_OP_US, _MANY_OPS = 20.0, 50
_INSIDE = {"DtoD", "memset"}  # kinds of copies
COPIES = ("pageable copies to the device", "copies to the device", "pageable copies to the host", "copies to the host")

LOADING = ("data_loading", "cpu_bottleneck")  # labels of bottlenecks that may be waits for a loader
AVOIDABLE_FIRST = 0.15  # of a step: larger avoidable work comes before the step's state

Rule = Callable[[View], Bottleneck | None]


def diagnose(view: View) -> list[Bottleneck]:
    """All bottlenecks that a profile shows, with their causes and advice in plain words.

    Avoidable work and waits for a loader come first if they take at least `AVOIDABLE_FIRST` of the step: nearly every
    step is bound by something. Within both groups the largest share comes first.
    """
    b = view.breakdown
    if b.busy is None and (b.stretched or 0.0) > DISTORTED:
        return []
    avoidable = waste(view)
    states = _shown(BOTTLENECKS["cpu" if b.busy is None else "gpu"], view)
    loading = b.terms.get("data_loading", 0.0)
    waits = [state for state in states if state.label in LOADING and loading > state.share / 2]
    first = [bottleneck for bottleneck in (*avoidable, *waits) if bottleneck.share >= AVOIDABLE_FIRST]
    others = [bottleneck for bottleneck in (*states, *avoidable) if bottleneck not in first]
    return [*_largest_first(first), *_largest_first(others)]


def _largest_first(bottlenecks: Iterable[Bottleneck]) -> list[Bottleneck]:
    return sorted(bottlenecks, key=lambda bottleneck: -bottleneck.share)


def _shown(rules: Iterable[Rule], view: View) -> list[Bottleneck]:
    return [bottleneck for rule in rules if (bottleneck := rule(view)) is not None]


# --- a step with work on a GPU ----------------------------------------------------------------------------------


def cpu_bottleneck(view: View) -> Bottleneck | None:
    """The GPU waits for the host (data, a synchronisation, Python), but not for launches of small kernels."""
    b = view.breakdown
    loading, waiting, dispatching = b.terms["data_loading"], b.terms["synchronisation"], b.terms["dispatch"]
    outpaced = (b.enqueue or 0.0) >= 0.9 and (b.median_kernel_us or 0.0) >= _SMALL_KERNEL_US
    if b.host_late < 0.2 or not (loading >= 0.05 or waiting >= 0.05 or outpaced):
        return None
    shares = {"for data": loading, "after a synchronisation": waiting, "for Python to dispatch": dispatching}
    lines = view.places("synchronisation")
    places = {"after a synchronisation": f" in {', '.join(lines)}" if lines else ""}
    reasons = [f"{percent(share)} {what}{places.get(what, '')}" for what, share in shares.items() if share >= 0.05]
    words, causes = _faster_loading(view.trace) if loading >= 0.05 else ((), ())
    if waiting >= 0.05:
        words = (*words, "remove what waits for the GPU (.item(), .cpu(), printing a loss)")
    if dispatching >= max(loading, waiting):  # else launches are not what delays the GPU
        causes = ("dispatch", *causes)
    why = f"the GPU waits for the host {percent(b.host_late)} of the step ({', '.join(reasons)})"
    return Bottleneck("cpu_bottleneck", b.host_late, why, words, causes)


def many_small_kernels(view: View) -> Bottleneck | None:
    """Kernels that take no longer than their launches."""
    b = view.breakdown
    kernels, median_us = b.kernels or 0.0, b.median_kernel_us or 0.0
    small = kernels >= _MANY_KERNELS and median_us < _SMALL_KERNEL_US
    if not small or (b.gaps < 0.2 and (b.enqueue or 0.0) < 0.8):
        return None
    why = (
        f"{kernels:.0f} kernels a step, {duration(median_us / 1e6)} each (median),"
        f" and the GPU idle {percent(b.gaps)} of the step between them"
    )
    waits = sum(b.terms[name] for name in ("data_loading", "synchronisation", "allocation"))
    return Bottleneck("many_small_kernels", b.gaps - waits, why, causes=("many_small_kernels",))


def memory_copy(view: View) -> Bottleneck | None:
    """Exposed copies over the bus, which other work could hide, or within the device, which could be left out."""
    b = view.breakdown
    exposed, pageable = b.terms["exposed_copies"], b.pageable or 0.0
    if exposed < 0.10 and pageable < 0.05:
        return None
    why = f"copies that no kernel hides take {percent(exposed)} of the step"
    lines = list(dict.fromkeys(chain.from_iterable(view.places(name) for name in COPIES)))
    why += f" ({', '.join(lines[:3])})" if lines else ""
    inside = sum(copy.duration for copy in view.trace.copies if copy.kind in _INSIDE)
    words: tuple[str, ...] = ()
    causes: tuple[str, ...] = ("memory_copy",)
    if pageable >= 0.05:
        why += f", {percent(pageable)} from or to pageable memory"
        causes = ("pageable_copy", *causes)
    elif inside > sum(copy.duration for copy in view.trace.copies) / 2:
        why += " (within the device: a graph reads its batch from memory of its own)" if b.graph_launches else ""
        words = () if b.graph_launches else ("look in the trace for what copies within the device",)
        causes = ()
    return Bottleneck("memory_copy", max(exposed, pageable), why, words, causes)


def memory_bound(view: View) -> Bottleneck | None:
    """Half of the kernels' time goes to those that only move data."""
    b = view.breakdown
    share = b.terms["memory_bound"]
    if (b.busy or 0.0) < 0.8 or not share or share < 0.5 * b.kernel_share:
        return None
    why = f"kernels that only move data through memory take {percent(share)} of the step"
    return Bottleneck("memory_bound", share, why, causes=("memory_bound",))


def compute_bound(view: View) -> Bottleneck | None:
    """Half of the kernels' time goes to those near the card's arithmetic limit."""
    b = view.breakdown
    share = b.terms["compute_bound"]
    if (b.busy or 0.0) < 0.8 or not share or share < 0.5 * b.kernel_share:
        return None
    why = f"products and convolutions near this card's limit take {percent(share)} of the step"
    return Bottleneck("compute_bound", share, why, causes=("compute_bound",))


def gpu_idle(view: View) -> Bottleneck | None:
    """The GPU idles, and no other bottleneck explains half of that."""
    b = view.breakdown
    busy = b.busy or 0.0
    idle = 1 - busy
    others = _shown((rule for rule in BOTTLENECKS["gpu"] if rule is not gpu_idle), view)
    if busy >= 0.5 or max((other.share for other in others), default=0.0) >= idle / 2:
        return None
    why = f"the GPU does nothing {percent(idle)} of the step, and no single cause explains half of it"
    return Bottleneck("gpu_idle", idle, why, ("look for synchronisations in the trace",), ("gpu_idle",))


# --- a step on the CPU ------------------------------------------------------------------------------------------


def many_small_ops(view: View) -> Bottleneck | None:
    """Operators that take no longer than their calls."""
    b = view.breakdown
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


def matrix_products(view: View) -> Bottleneck | None:
    """Half of the step is matrix products."""
    b = view.breakdown
    share = b.terms.get("matrix", 0.0)
    if share < 0.5:
        return None
    why = f"matrix products take {percent(share)} of the step"
    return Bottleneck("matrix_products", share, why, causes=("compute_bound",))


def memory_passes(view: View) -> Bottleneck | None:
    """Half of the step is passes over memory, each much longer than the call of its operator."""
    b = view.breakdown
    share = sum(b.terms.get(name, 0.0) for name in ("elementwise", "activation", "normalization", "reduction"))
    if share < 0.5 or _has_small_ops(b):
        return None
    why = f"element-wise operators and reductions, each a pass over memory, take {percent(share)} of the step"
    return Bottleneck("memory_passes", share, why, causes=("memory_passes",))


def data_loading(view: View) -> Bottleneck | None:
    """The step waits for its DataLoader."""
    b = view.breakdown
    share = b.terms.get("data_loading", 0.0)
    if share < 0.2:
        return None
    words, causes = _faster_loading(view.trace)
    why = f"the step waits for its next batch {percent(share)} of the time"
    return Bottleneck("data_loading", share, why, words, causes)


def outside_ops(view: View) -> Bottleneck | None:
    """Half of the step is time outside torch."""
    b = view.breakdown
    share = b.terms[OUTSIDE]
    if share < 0.5:
        return None
    why = f"{percent(share)} of the step passes outside torch's operators (Python, data, waiting)"
    return Bottleneck("outside_ops", share, why, ("look at the step's own Python code",))


def one_op(view: View) -> Bottleneck | None:
    """One operator takes half of the step."""
    top = view.trace.top_ops(1)
    if not top or top[0].share < 0.5:
        return None
    share = min(top[0].share, 1.0)  # threads run it side by side
    return Bottleneck("one_op", share, f"{top[0].name} takes {percent(share)} of the step")


def _faster_loading(trace: Trace) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Advice against waiting for a DataLoader, and causes for strategies; no strategy helps a loader with workers."""
    if any("MultiProcessing" in span.name for span in trace.annotations):
        return ("more DataLoader workers (num_workers, prefetch_factor), or less work for each batch",), ()
    words = "DataLoader(num_workers=…, prefetch_factor=…), so that processes of its own make batches ahead"
    return (words,), ("data_loading",)


BOTTLENECKS: Mapping[str, tuple[Rule, ...]] = {
    "gpu": (cpu_bottleneck, many_small_kernels, memory_copy, memory_bound, compute_bound, gpu_idle),
    "cpu": (many_small_ops, matrix_products, memory_passes, data_loading, outside_ops, one_op),
}
