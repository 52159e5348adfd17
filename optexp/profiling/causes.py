"""Causes of a difference between two steps: accounts of both, subtracted, in words.

Each rule covers one change (a graph, a compiler, another attention kernel, a dtype), and takes the accounts that it
explains out of the ledger. Each account that is left becomes a cause of its own, so that all causes add up to the
difference.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from optexp.profiling.accounts import COMPILATION, HOST_OPERATORS, OVERLAP, PYTHON, Account
from optexp.profiling.breakdown import GAPS, OUTSIDE, Breakdown
from optexp.profiling.view import View
from optexp.records.difference import Cause
from optexp.support.units import duration
from optexp.trace import MATRIX_OPS, Trace

NAMED = 2  # most kernels or operators that a sentence names
MANY = 0.2  # share of the launches, from which a change of their number is a cause
LITTLE = 0.5  # calls: a smaller change of their number is not shown
FUSED = (
    "compiled kernels",
    "elementwise",
    "activation",
    "normalization",
    "reduction",
    "indexing and concatenation",
    "embedding",
    "other kernels",
    "autograd",
)
PARTS_OF_ATTENTION = (
    "matrix products", "activation", "elementwise", "reduction", "casts", "layout copies", "fills",
    "indexing and concatenation", "other kernels",
)  # fmt: skip
LAUNCHING = ("dispatch", "launch_gap", PYTHON)
_WORDS = {
    "data_loading": "waiting for the loader",
    "synchronisation": "waiting for the GPU",
    "allocation": "cudaMalloc and cudaFree",
    "dispatch": "launches",
    "launch_gap": "gaps between queued kernels",
    "other": "gaps without a known cause",
    PYTHON: "Python between operators",
    HOST_OPERATORS: "operators computed on the host",
    COMPILATION: "torch.compile compiles in each step",
    OVERLAP: "kernels side by side",
    OUTSIDE: "time outside operators",
    "casts": "casts between dtypes",
    "layout copies": "copies into another layout",
    "recomputation": "forward operators computed again in the backward pass",
    "fills": "fills of memory",
}
_WIDTHS = {"float64": 64, "float32": 32, "tf32": 19, "bfloat16": 16, "float16": 16}  # bits that are multiplied
_BACKENDS = {  # the first pattern that is found: kernels of cuDNN have "flash" in their names, too
    "cuDNN": r"cudnn",
    "flash": r"flash",
    "memory-efficient": r"efficient|fmha|mem_eff",
}


class Ledger:
    """Changes of accounts, in µs of a step, from which rules take what they explain."""

    def __init__(self, before: View, after: View) -> None:
        names = {**before.accounts, **after.accounts}
        self.left = {name: after.account(name).us - before.account(name).us for name in names}

    def take(self, names: Collection[str]) -> float:
        """Take accounts out of the ledger; the sum of their changes."""
        return sum(self.left.pop(name, 0.0) for name in names)


Rule = Callable[[View, View, Ledger], Cause | None]


def causes(before: View, after: View) -> list[Cause]:
    """All causes of the difference between the traced steps, the largest first; they add up to it."""
    ledger = Ledger(before, after)
    found = [cause for rule in RULES if (cause := rule(before, after, ledger)) is not None]
    found += [_account(before, after, name, us) for name, us in ledger.left.items()]
    total = sum(cause.us or 0.0 for cause in found)
    little = abs(total) < 0.03 * before.breakdown.wall_us
    return sorted(found, key=lambda cause: -(abs(cause.us or 0.0) if little else (cause.us or 0.0) * total))


# --- rules -------------------------------------------------------------------------------------------------------


def compiled(before: View, after: View, ledger: Ledger) -> Cause | None:
    """torch.compile fused operators into kernels, or stopped doing so."""
    was, now = before.account("compiled kernels"), after.account("compiled kernels")
    if bool(was.calls) == bool(now.calls):
        return None
    kind = "kernels" if after.breakdown.busy is not None else "operators"
    names = [name for name in FUSED if name in ledger.left]
    if after.breakdown.busy is None:
        names.append(OUTSIDE)
    old, new = _sum(before, names), _sum(after, names)
    us = ledger.take(names)
    if now.calls:
        words = f"fusion: {old.calls:.0f} {kind} became {_made(after, now, new)}"
    else:
        words = f"no fusion any more: {_made(before, was, old)} became {new.calls:.0f} {kind}"
    return _cause("compiled kernels", words, us)


def _made(arm: View, compiled: Account, every: Account) -> str:
    """Compiled work and all that fusion left beside it; on a CPU a trace shows compiled regions, not their kernels."""
    if arm.breakdown.busy is not None:
        return f"{_count(every.calls, 'kernel')}, compiled ones among them ({_names(compiled)})"
    regions, rest = sum(arm.trace.compiled_calls().values()) / len(arm.trace.steps), every.calls - compiled.calls
    return _count(regions, "compiled region") + (f" and {_count(rest, 'operator')}" if round(rest) else "")


def captured(before: View, after: View, ledger: Ledger) -> Cause | None:
    """Launches that became one graph, or the reverse."""
    was, now = before.breakdown, after.breakdown
    graphs, earlier = now.graph_launches or 0.0, was.graph_launches or 0.0
    if bool(round(graphs)) == bool(round(earlier)):
        return None
    us = ledger.take([*LAUNCHING, "allocation"])
    if graphs > earlier:
        held = f"{_count(graphs, 'CUDA graph')} of {(now.graph_kernels or 0.0) / graphs:.0f} kernels"
        return _cause("cuda graph", f"{_launches(was, now)} ({held})", us)
    return _cause("cuda graph", f"{_launches(was, now)}: no CUDA graph any more", us)


def attention(before: View, after: View, ledger: Ledger) -> Cause | None:
    """Another attention back end."""
    was, now = backend(before), backend(after)
    parts: list[str] = []
    if was and not now:
        parts = _parts_of_attention(before, after)
        now = "math" if parts else ""
    if not was or not now or was == now or "attention" not in ledger.left:
        return None
    slower_parts = [name for name in parts if ledger.left.get(name, 0.0) > 0]
    us = ledger.take(["attention", *slower_parts])
    old_kernels = _names(before.account("attention"))
    new_kernels = ", ".join(parts) or _names(after.account("attention"))
    words = f"attention: {now} kernels instead of {was} ones ({new_kernels} instead of {old_kernels})"
    words += _why_other_attention(was, before, after)
    return _cause("attention", words + _where(after, "attention"), us)


def _why_other_attention(was: str, before: View, after: View) -> str:
    """The mask because of which attention left the back end `was`, as the end of a sentence; "" for another reason."""
    if masked(after.trace) and not masked(before.trace):
        return ", because it gets an explicit mask, which flash attention does not take"
    if was in ("flash", "cuDNN") and after.breakdown.graph_launches and not before.breakdown.graph_launches:
        return (
            ": while a graph is captured, a model cannot look at the values of its mask, so that attention gets an"
            f" explicit one, which {was} attention does not take"
        )
    return ""


def _parts_of_attention(before: View, after: View) -> list[str]:
    """Accounts that hold the kernels of attention where a graph hides its operators; empty where nothing hints at it.

    Each call of attention then adds two GEMMs (three, where one is split) and a softmax.
    """
    calls = before.account("attention").calls
    extra = {name: after.account(name).calls - before.account(name).calls for name in PARTS_OF_ATTENTION}
    if not calls or not 2 <= extra["matrix products"] / calls <= 3 or extra["activation"] < calls:
        return []
    return [name for name, count in extra.items() if count > 0]


def backend(arm: View) -> str:
    """The attention back end of a step; "" where it has no attention, "math" where operators compute it one by one."""
    account = arm.account("attention")
    names = [op.name for op in arm.trace.ops if "attention" in op.name] or list(account.works)
    if not account.calls or not names:
        return ""
    kinds = (next((kind for kind, pattern in _BACKENDS.items() if re.search(pattern, name)), "") for name in names)
    counted = Counter(kind for kind in kinds if kind)
    return counted.most_common(1)[0][0] if counted else "math"


def masked(trace: Trace) -> bool:
    """Whether attention is called with an explicit mask, a tensor."""
    return any(len(op.inputs) >= 4 for op in trace.ops if op.name == "aten::scaled_dot_product_attention")


def precision(before: View, after: View, ledger: Ledger) -> Cause | None:
    """Matrix products and convolutions in another dtype."""
    old, new = dtypes(before), dtypes(after)
    names = [name for name in ("matrix products", "convolutions") if ledger.left.get(name)]
    if not old or not new or old == new or not names:
        return None
    kind = " and ".join(names)
    was, now = _sum(before, names), _sum(after, names)
    us = ledger.take(names)
    words = f"{kind} in {' and '.join(new)} instead of {' and '.join(old)}: {_time(was)} → {_time(now)}"
    if us > 0 and _width(new) < _width(old) and now.calls <= was.calls:
        words += f", slower: no fast kernel for these shapes in {' and '.join(new)} ({_names(now)})"
    return _cause(names[0], words, us)


def _width(names: Sequence[str]) -> float:
    """Bits of the first dtype; 0 where it is unknown."""
    return _WIDTHS.get(names[0], 0)


def dtypes(arm: View) -> list[str]:
    """Dtypes of matrix products and convolutions, the commonest first; float32 in TF32 is "tf32"."""
    dtypes_ = [dtype for dtype, _ in arm.trace.op_dtypes(MATRIX_OPS).most_common()]
    names = " ".join([*arm.account("matrix products").works, *arm.account("convolutions").works])
    if "float32" in dtypes_ and re.search(r"tf32|s1688", names):
        dtypes_[dtypes_.index("float32")] = "tf32"
    return dtypes_


def launches(before: View, after: View, ledger: Ledger) -> Cause | None:
    """More or fewer launches, most of them of one kind of work."""
    was, now = before.breakdown.launches or 0.0, after.breakdown.launches or 0.0
    late = ledger.left.get("dispatch", 0.0)
    if late * (now - was) <= 0 or abs(now - was) < MANY * max(was, now):
        return None
    kinds = [name for name in ledger.left if name not in (*GAPS, PYTHON, HOST_OPERATORS, COMPILATION, OVERLAP)]
    more = {name: after.account(name).calls - before.account(name).calls for name in kinds}
    most = max(more, key=lambda name: more[name] * (now - was), default=None)
    if most is None or abs(more[most]) < abs(now - was) / 2 or abs(late) < abs(ledger.left[most]):
        return None
    us = ledger.take([most, "dispatch"])
    old, new = before.account(most), after.account(most)
    words = (
        f"{_WORDS.get(most, most)}: {old.calls:.0f} → {new.calls:.0f} kernels a step, of {was:.0f} → {now:.0f} launches"
    )
    return _cause(most, words + _where(after if us > 0 else before, most), us)


RULES: tuple[Rule, ...] = (compiled, captured, attention, precision, launches)


# --- one account by itself ---------------------------------------------------------------------------------------


def _account(before: View, after: View, name: str, us: float) -> Cause:
    was, now, kind = before.account(name), after.account(name), _WORDS.get(name, name)
    if name == "dispatch":
        return _cause(name, _launches(before.breakdown, after.breakdown), us)
    words = f"{kind}: {_time(was)} → {_time(now)} a step"
    if abs(was.calls - now.calls) >= LITTLE:
        words = f"{kind}: {was.calls:.0f} → {now.calls:.0f} a step, {_time(was)} → {_time(now)}"
    gone, new = (_names(_without(a, b)) for a, b in ((was, now), (now, was)))
    if gone and new:
        words += f" ({new} instead of {gone})"
    elif gone or new:
        words += f" (new: {new})" if new else f" (gone: {gone})"
    return _cause(name, words + _where(after if us > 0 else before, name), us)


def _cause(account: str, words: str, us: float) -> Cause:
    return Cause(account, f"{words}, {signed(us)}", us)


def signed(us: float) -> str:
    """A change of time with its sign."""
    return f"{'+' if us > 0 else '−'}{duration(abs(us) / 1e6)}"


def _launches(was: Breakdown, now: Breakdown) -> str:
    old, new = was.launches or 0.0, now.launches or 0.0
    if round(old) == round(new):
        return f"the host dispatches {old:.0f} launches a step at another pace"
    return f"{_count(old, 'launch')} a step became {new:.0f}"


def _time(account: Account) -> str:
    return duration(account.us / 1e6) if account.us else "0"


def _sum(arm: View, names: Iterable[str]) -> Account:
    whole = Account()
    for name in names:
        account = arm.account(name)
        whole.us += account.us
        whole.calls += account.calls
        whole.works |= account.works
    return whole


def _without(account: Account, other: Account) -> Account:
    """The works of an account that another account does not have."""
    return Account(works={name: us for name, us in account.works.items() if name not in other.works})


def _names(account: Account) -> str:
    """The works with most time."""
    ranked = _ranked(account.works)
    more = f" and {len(ranked) - NAMED} more" if len(ranked) > NAMED else ""
    return ", ".join(ranked[:NAMED]) + more


def _ranked(works: Mapping[str, float]) -> list[str]:
    return sorted(works, key=lambda name: -works[name])


def _where(arm: View, name: str) -> str:
    places = arm.places(name)
    return f", in {', '.join(places)}" if places else ""


def _count(number: float, noun: str) -> str:
    if round(number) == 1:
        return f"1 {noun}"
    return f"{number:.0f} {noun}{'es' if noun.endswith('ch') else 's'}"
