"""Why the candidate's step time differs from the baseline's: terms that add up to the difference, causes in words."""

from __future__ import annotations

from dataclasses import replace

from optexp.profiling.breakdown import SLOWED, Breakdown
from optexp.profiling.causes import causes, signed
from optexp.profiling.changes import changes
from optexp.profiling.view import View
from optexp.records.difference import Cause, Difference
from optexp.records.profile import SAME_STEP
from optexp.support.units import duration

DISTORTED = 5.0  # traced over timed CPU step, above which the trace shows mostly the cost of tracing
NAMELESS = ("other", "other kernels")  # accounts that name no cause
CLOCK = 0.005  # change of the kernels' time by the card's clock, from which it is said
SHOWN = 5  # most causes with a sentence of their own
SMALL = 0.02  # of the difference: smaller causes are summed up as "all else"

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


def difference(before: View, after: View) -> Difference | None:
    """Causes and changes between the traced steps; None where tracing distorts them, as on a CPU that is busy."""
    if not _on_gpu(before, after) and _stretched(before, after) > DISTORTED:
        return None
    if before.beside is None:  # the candidate's operators may name the kernels in a graph of the baseline
        before = replace(before, beside=after.trace)
    found = causes(before, after)
    nameless = sum(cause.us or 0.0 for cause in found if cause.account in NAMELESS)
    traced_us = after.breakdown.wall_us - before.breakdown.wall_us
    return Difference(traced_us, traced_us, nameless, found, changes(before, after))


def explain(before: View, after: View, found: Difference | None, step: str = "the profiled step") -> list[str]:
    """Sentences on the change from baseline to candidate, the step's own difference first; slower or faster.

    step: Name of the step in the first sentence.
    """
    stretched = _stretched(before, after)
    if found is None:
        return [f"No explanation: tracing made a step {stretched:.0f} times slower, as on a machine busy otherwise"]
    was, now = before.breakdown, after.breakdown
    sentences = [_step(step, was, now), *_causes(found.causes, found.us or 0.0, now.wall_us)]
    if _on_gpu(before, after):
        sentences += _share("GPU busy", was.busy or 0.0, now.busy or 0.0)
        sentences += _share("host-late gaps", was.host_late, now.host_late)
        if stretched > SLOWED:
            text = f"tracing made a step up to {stretched:.1f} times slower; the host's terms are scaled back"
            sentences.append(text)
        clocks = [view.breakdown.clock - 1 for view in (before, after)]
        if max(map(abs, clocks)) >= CLOCK:
            text = " and ".join(f"{100 * clock:+.1f} %" for clock in clocks)
            sentences.append(f"kernels are scaled from the traced to the timed steps by {text}: the clock changes")
    return [sentence[0].upper() + sentence[1:] for sentence in sentences]


def coverage(found: Difference) -> str:
    """How much of the timed difference the causes add up to, in a sentence; empty without a difference."""
    if found.explained is None or found.us is None:
        return ""
    rest = f"; {signed(found.unexplained_us or 0.0)} is unexplained" if found.explained < 0.95 else ""
    return f"Of {signed(found.us)} a step, these causes explain {percent(max(found.explained, 0.0))}{rest}"


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _on_gpu(before: View, after: View) -> bool:
    return before.breakdown.busy is not None and after.breakdown.busy is not None


def _stretched(before: View, after: View) -> float:
    return max(before.breakdown.stretched or 0.0, after.breakdown.stretched or 0.0)


_TERMS = 4  # most terms in the first sentence


def _step(name: str, before: Breakdown, after: Breakdown) -> str:
    """The difference of the step and the terms it is made of, which add up to it."""
    change = after.wall_us - before.wall_us
    verb = "got slower" if change > 0 else "got faster"
    if abs(change) < SAME_STEP * before.wall_us:
        verb = "takes about as long"
    terms = sorted({*before.terms, *after.terms}, key=lambda term: -abs(after.us(term) - before.us(term)))
    changed = [(_WORDS.get(term, term), after.us(term) - before.us(term)) for term in terms]
    shown = [(term, us) for term, us in changed[:_TERMS] if abs(us) >= max(0.05 * abs(change), 0.05)]
    rest = change - sum(us for _, us in shown)
    if shown and abs(rest) >= max(0.05 * abs(change), 0.05):
        shown.append(("the rest", rest))
    parts = f": {', '.join(f'{term} {signed(us)}' for term, us in shown)}" if shown else ""
    return f"{name} {verb}, {duration(before.wall_us / 1e6)} → {duration(after.wall_us / 1e6)}{parts}"


def _causes(found: list[Cause], whole_us: float, step_us: float) -> list[str]:
    """Sentences on the largest causes, and one on the sum of the others if it is large enough."""
    least_us = max(SMALL * abs(whole_us), 0.005 * step_us, 0.05)
    shown = [cause for cause in found if abs(cause.us or 0.0) >= least_us]
    words = [cause.words for cause in shown[:SHOWN]]
    rest = sum(cause.us or 0.0 for cause in found) - sum(cause.us or 0.0 for cause in shown[:SHOWN])
    if words and abs(rest) >= least_us:
        words.append(f"all else, {signed(rest)}")
    return words


def _share(name: str, before: float, after: float) -> list[str]:
    if abs(after - before) < 0.03:
        return []
    return [f"{name} {'rose' if after > before else 'fell'} from {percent(before)} to {percent(after)} of the step"]
