"""Waste: work of a step that the same program could leave out if written differently, and the lines that cause it.

The states of a step (bound by memory, by arithmetic, by the host) are in `diagnosis`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from optexp.profiling.accounts import COMPILATION, HOST_OPERATORS, PYTHON
from optexp.profiling.attention import by_hand, kernel_us
from optexp.profiling.causes import backend, masked
from optexp.profiling.explanation import percent
from optexp.profiling.intervals import Union
from optexp.profiling.roofline import SHORT_US
from optexp.profiling.view import View
from optexp.records.profile import Bottleneck
from optexp.support.units import duration
from optexp.trace import MATRIX_OPS, short_name

LEAST = 0.1  # share of the step from which waste is named
LATE = 0.2  # share of the step in host-late gaps, from which the host may explain idle streams
STALLED = 0.05  # share of the step from which compilation in steady steps is named
MANY_UPDATES = 20  # kernels per step of an optimizer that updates parameters one by one

Rule = Callable[[View], Bottleneck | None]


def waste(view: View) -> list[Bottleneck]:
    """All avoidable work of at least its rule's share of the step, the largest share first."""
    found = [bottleneck for rule in RULES if (bottleneck := rule(view)) is not None]
    return sorted(found, key=lambda bottleneck: -bottleneck.share)


def casts(view: View) -> Bottleneck | None:
    """Tensors change their dtype in each step."""
    why = "casts between dtypes take {share} of the step, {calls} of them{where}"
    return _account(view, "casts", why, "keep one dtype, or cast once outside of the step")


def layout_copies(view: View) -> Bottleneck | None:
    """Tensors are copied unchanged, or into another layout."""
    why = "copies of tensors on the same device take {share} of the step, {calls} of them{where}"
    return _account(view, "layout copies", why, "leave out clone() and contiguous(), or choose the layout once")


def recomputation(view: View) -> Bottleneck | None:
    """The backward pass computes forward operators again."""
    why = "operators of the forward pass that backward computes again take {share} of the step{where}"
    return _account(view, "recomputation", why, "checkpoint fewer layers, where memory allows")


def fills(view: View) -> Bottleneck | None:
    """Memory is filled with a constant."""
    why = "fills of memory take {share} of the step{where}"
    return _account(view, "fills", why, "zero_grad(set_to_none=True); torch.empty for what is written anyway")


def compilation(view: View) -> Bottleneck | None:
    """torch.compile compiles in steady steps."""
    why = "torch.compile compiles anew in each step, {share} of it{where}"
    words = "find what changes from step to step: TORCH_LOGS=recompiles; mark it dynamic"
    return _account(view, COMPILATION, why, words, STALLED)


def allocation(view: View) -> Bottleneck | None:
    """Steady steps ask the driver for memory."""
    why = "the GPU waits for cudaMalloc and cudaFree {share} of the step{where}"
    return _account(view, "allocation", why, "leave out torch.cuda.empty_cache(), and keep tensors from step to step")


def python(view: View) -> Bottleneck | None:
    """The host runs Python and nothing else; with advice only where a line of the user's code is known."""
    why = "Python outside of torch takes {share} of the step{where}"
    found, lines = _account(view, PYTHON, why, ""), ", ".join(view.places(PYTHON))
    words = f"Python in {lines}: move it out of the step, or to a thread of its own"
    return found and replace(found, try_=(words,) if lines else ())


def operators_on_the_host(view: View) -> Bottleneck | None:
    """Operators compute on the host though the step has a GPU."""
    why = "operators that compute on the host, not on the GPU, take {share} of the step{where}"
    return _account(view, HOST_OPERATORS, why, "move their tensors to the GPU")


def copies_to_the_host(view: View) -> Bottleneck | None:
    """Results are fetched in each step."""
    names = ("copies to the host", "pageable copies to the host")
    name = max(names, key=lambda name: view.account(name).us)
    why = "copies to the host take {share} of the step{where}"
    found = _account(view, name, why, "leave results on the GPU, or fetch them rarely")
    return found and replace(found, label="copies_to_the_host")


def optimizer_by_parameter(view: View) -> Bottleneck | None:
    """The optimizer updates one parameter after the other."""
    account = view.account("optimizer")
    gathered = any("multi_tensor" in name or "_foreach" in name or "_fused" in name for name in account.works)
    if gathered or account.calls < MANY_UPDATES:
        return None
    share = (account.us + _dispatched(view, account.calls)) / view.breakdown.wall_us
    if share < LEAST:
        return None
    work = f"{account.calls:.0f} kernels, {percent(share)} of the step"
    why = f"the optimizer updates one parameter after the other, {work}"
    return Bottleneck("optimizer_by_parameter", share, why, (), ("many_small_kernels",))


def _dispatched(view: View, launches: float) -> float:
    """µs that the host takes to dispatch this many launches."""
    found = view.breakdown
    return found.us("dispatch") * launches / found.launches if found.launches else 0.0


def unfused_attention(view: View) -> Bottleneck | None:
    """Attention is computed operator by operator, or by a slower kernel because of a mask."""
    found = backend(view)
    if not found:
        return _attention_by_hand(view)
    account = view.account("attention")
    share = account.us / view.breakdown.wall_us
    explicit = masked(view.trace) and found not in ("flash", "")
    if share < LEAST or not (found == "math" or explicit):
        return None
    reason = ", as it gets an explicit mask" if explicit else ""
    where = _where(view, "attention")
    why = f"attention by {found} kernels, not flash ones{reason}, takes {percent(share)} of the step{where}"
    words = "is_causal=True or no mask, float16 or bfloat16, and no torch.nn.attention.sdpa_kernel that rules flash out"
    return Bottleneck("unfused_attention", share, why, (words,), ("memory_bound",))


def _attention_by_hand(view: View) -> Bottleneck | None:
    spans = by_hand(view.trace)
    share = kernel_us(view.trace, spans) / view.breakdown.wall_us
    if share < LEAST:
        return None
    calls = len(list(spans)) / len(view.trace.steps)
    how = f"a product, a softmax and a product, {calls:.0f} a step"
    why = f"attention by hand ({how}) takes {percent(share)} of the step"
    words = "torch.nn.functional.scaled_dot_product_attention"
    return Bottleneck("unfused_attention", share, why, (words,), ("memory_bound",))


def double_precision(view: View) -> Bottleneck | None:
    """Matrix products in float64."""
    dtypes = view.trace.op_dtypes(MATRIX_OPS)
    share = (view.account("matrix products").us + view.account("convolutions").us) / view.breakdown.wall_us
    if share < LEAST or not dtypes or dtypes.most_common(1)[0][0] != "float64":
        return None
    why = f"matrix products in float64 take {percent(share)} of the step{_where(view, 'matrix products')}"
    return Bottleneck("double_precision", share, why, ("float32, unless the digits are needed",), ("compute_bound",))


def small_grids(view: View) -> Bottleneck | None:
    """Long kernels with fewer blocks than the card has multiprocessors."""
    cores, kernels = view.trace.multiprocessors, view.trace.kernels
    if not cores:
        return None
    few = [k for k in kernels if k.duration >= SHORT_US and k.blocks is not None and k.blocks < cores / 2]
    us = Union(kernel.interval for kernel in few).total / len(view.trace.steps)
    share = us / view.breakdown.wall_us
    if share < 2 * LEAST:
        return None
    longest = max(few, key=lambda kernel: kernel.duration)
    example = f"{short_name(longest.name)}: {longest.blocks} blocks, {duration(longest.duration / 1e6)}"
    why = (
        f"kernels that use less than half of the {cores} multiprocessors take {percent(share)} of the step ({example})"
    )
    return Bottleneck("small_grids", share, why, ("more work for each launch: larger batches, more blocks",))


def streams_in_turn(view: View) -> Bottleneck | None:
    """Several streams that never run concurrently: one always waits for the other."""
    by_stream: dict[int | None, list[tuple[float, float]]] = {}
    for kernel in view.trace.kernels:
        by_stream.setdefault(kernel.stream, []).append(kernel.interval)
    if len(by_stream) < 2:
        return None
    alone = [Union(intervals).total for intervals in by_stream.values()]
    together = Union(k.interval for k in view.trace.kernels).total
    second = sum(alone) - max(alone)
    share = second / len(view.trace.steps) / view.breakdown.wall_us
    if share < LEAST or view.breakdown.host_late >= LATE or sum(alone) - together > 0.1 * second:
        return None
    why = f"{len(by_stream)} streams never run side by side: one waits for the other, {percent(share)} of the step"
    return Bottleneck("streams_in_turn", share, why, ("record an event where its data is ready, not at the end",))


RULES: tuple[Rule, ...] = (
    casts,
    layout_copies,
    recomputation,
    fills,
    compilation,
    allocation,
    python,
    operators_on_the_host,
    copies_to_the_host,
    optimizer_by_parameter,
    unfused_attention,
    double_precision,
    small_grids,
    streams_in_turn,
)


def _account(view: View, name: str, why: str, words: str, least: float = LEAST) -> Bottleneck | None:
    account = view.account(name)
    share = account.us / view.breakdown.wall_us
    if share < least:
        return None
    text = why.format(share=percent(share), calls=f"{account.calls:.0f}", where=_where(view, name))
    return Bottleneck(name.replace(" ", "_"), share, text, (words,))


def _where(view: View, name: str) -> str:
    places = view.places(name)
    return f" ({', '.join(places)})" if places else ""
