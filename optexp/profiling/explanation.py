"""Why the candidate's step takes another time than the baseline's, in sentences with numbers."""

from __future__ import annotations

from collections.abc import Sequence

from optexp.profiling.breakdown import SLOWED, Breakdown
from optexp.records.profile import SAME_STEP, TopEntry
from optexp.support.units import duration
from optexp.trace import MATRIX_OPS, Trace

DISTORTED = 5.0  # a CPU step that tracing stretches by more than this shows the tracing

_WORDS = {
    "memory_bound": "memory-bound kernels",
    "compute_bound": "compute-bound kernels",
    "latency_bound": "latency-bound kernels",
    "unclassified": "kernels of unknown class",
    "exposed_copies": "exposed copies",
    "data_loading": "waiting for data",
    "synchronisation": "gaps after synchronisations",
    "allocation": "gaps in cudaMalloc and cudaFree",
    "dispatch": "gaps while the host dispatched",
    "launch_gap": "gaps between queued kernels",
    "other": "other gaps",
    "matrix": "matrix products",
    "elementwise": "element-wise operators",
    "memory": "copies and allocations",
    "compiled": "compiled code",
    "autograd": "autograd's bookkeeping",
    "outside_ops": "Python and all else outside operators",
}


def explain(before_trace: Trace, after_trace: Trace, before: Breakdown, after: Breakdown) -> list[str]:
    """What changed from baseline to candidate, the step's own difference first; for slower as for faster."""
    on_gpu = before.busy is not None and after.busy is not None
    stretched = max(before.stretched or 0.0, after.stretched or 0.0)
    if not on_gpu and stretched > DISTORTED:
        return [f"No explanation: tracing made a step {stretched:.0f} times slower, as on a machine busy otherwise"]
    sentences = [_step(before, after)]
    if on_gpu:
        sentences += _launches(before, after)
        sentences += _share("GPU busy", before.busy or 0.0, after.busy or 0.0)
        sentences += _share("host-late gaps", before.host_late, after.host_late)
        sentences += _share("exposed copies", before.terms["exposed_copies"], after.terms["exposed_copies"])
        sentences += _work("kernels", before_trace.top_kernels(_ALL), after_trace.top_kernels(_ALL), after.wall_us)
    else:
        if round(before.ops) != round(after.ops):
            sentences.append(f"{before.ops:.0f} operator calls a step became {after.ops:.0f}")
        sentences += _work("operators", before_trace.top_ops(_ALL), after_trace.top_ops(_ALL), after.wall_us)
    sentences += _precision(before_trace, after_trace)
    if on_gpu and stretched > SLOWED:
        sentences.append(f"tracing made a step up to {stretched:.1f} times slower; the host's terms are scaled back")
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


_ALL = 10**6
_SHOWN = 3


def _step(before: Breakdown, after: Breakdown) -> str:
    """The difference of the step and the terms it is made of, which add up to it."""
    difference = after.wall_us - before.wall_us
    verb = "got slower" if difference > 0 else "got faster"
    if abs(difference) < SAME_STEP * before.wall_us:
        verb = "takes about as long"
    names = sorted({*before.terms, *after.terms}, key=lambda name: -abs(after.us(name) - before.us(name)))
    changes = [(_WORDS.get(name, name), after.us(name) - before.us(name)) for name in names]
    shown = [change for change in changes[: _SHOWN + 1] if abs(change[1]) >= max(0.05 * abs(difference), 0.05)]
    rest = difference - sum(us for _, us in shown)
    if shown and abs(rest) >= max(0.05 * abs(difference), 0.05):
        shown.append(("the rest", rest))
    parts = f": {', '.join(f'{name} {_signed(us)}' for name, us in shown)}" if shown else ""
    return f"the profiled step {verb}, {duration(before.wall_us / 1e6)} → {duration(after.wall_us / 1e6)}{parts}"


def _launches(before: Breakdown, after: Breakdown) -> list[str]:
    sentences = []
    launches, now = before.launches or 0.0, after.launches or 0.0
    if round(launches) != round(now):
        graphs = after.graph_launches or 0.0
        captured = (
            f" ({_count(graphs, 'CUDA graph')} of {(after.graph_kernels or 0.0) / graphs:.0f} kernels)"
            if graphs > (before.graph_launches or 0.0)
            else ""
        )
        sentences.append(f"{_count(launches, 'launch')} a step became {now:.0f}{captured}")
    kernels, now = before.kernels or 0.0, after.kernels or 0.0
    if round(kernels) != round(now):
        sentences.append(f"{_count(kernels, 'kernel')} a step became {now:.0f}")
    return sentences


def _share(name: str, before: float, after: float) -> list[str]:
    if abs(after - before) < 0.03:
        return []
    return [f"{name} {'rose' if after > before else 'fell'} from {percent(before)} to {percent(after)} of the step"]


def _work(kind: str, before: Sequence[TopEntry], after: Sequence[TopEntry], step_us: float) -> list[str]:
    """Kernels or operators that vanished, appeared, or take another time, those with most time first."""
    old, new = ({row.name: row for row in rows} for rows in (before, after))
    sentences = []
    for verb, rows in (
        ("gone", [row for row in before if row.name not in new]),
        ("new", [row for row in after if row.name not in old]),
    ):
        if rows:
            more = f", and {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
            listed = ", ".join(f"{r.name} ({r.calls:.3g}×, {duration((r.us or 0.0) / 1e6)})" for r in rows[:_SHOWN])
            sentences.append(f"{kind} {verb}: {listed}{more}")
    changed = [
        (name, old[name].us or 0.0, row.us or 0.0)
        for name, row in new.items()
        if name in old and abs((row.us or 0.0) - (was := old[name].us or 0.0)) > max(0.2 * was, 0.02 * step_us)
    ]
    changed.sort(key=lambda change: -abs(change[2] - change[1]))
    if changed:
        listed = ", ".join(f"{n} {duration(b / 1e6)} → {duration(a / 1e6)}" for n, b, a in changed[:_SHOWN])
        sentences.append(f"{kind} that take another time: {listed}")
    return sentences


def _precision(before: Trace, after: Trace) -> list[str]:
    old, new = before.op_dtypes(MATRIX_OPS), after.op_dtypes(MATRIX_OPS)
    if not old or not new or old.keys() == new.keys():
        return []
    counted = " and ".join(f"{n / len(after.steps):.0f} in {dtype}" for dtype, n in new.most_common())
    return [f"matrix products a step, now {counted} (before: {', '.join(sorted(old))})"]


def _signed(us: float) -> str:
    return f"{'+' if us > 0 else '−'}{duration(abs(us) / 1e6)}"


def _count(number: float, noun: str) -> str:
    if round(number) == 1:
        return f"1 {noun}"
    return f"{number:.0f} {noun}{'es' if noun.endswith('ch') else 's'}"
