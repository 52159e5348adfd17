"""Why the candidate's peak memory differs from the baseline's: the compositions of both peaks, term by term."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from optexp.records.memory import (
    CATEGORIES,
    UNNAMED,
    AllocationEntry,
    MemoryDifference,
    MemoryProfile,
    MemoryTerm,
    SavedEntry,
)
from optexp.support.units import byte_size, signed_bytes

SAME_PEAK, SAME_BYTES = 0.01, 2**16  # peaks that differ by less agree
COMPLETE = 0.95  # share of a difference that the named terms should cover
TERMS, DETAILS = 4, 3  # most terms, and most details of a term, in a sentence
UNNAMED_ROWS = "allocations"  # name of allocations of which only the module is known
SMALL = 0.05  # of the difference: sentences leave smaller terms and details out


def difference(before: MemoryProfile, after: MemoryProfile) -> MemoryDifference | None:
    """Explain the difference of two peaks; None where they agree.

    Args:
        before: Of the baseline, with the measured peak (see `MemoryProfile.reconciled`).
        after: Of the candidate, likewise.
    """
    change = after.peak_bytes - before.peak_bytes
    if abs(change) < max(SAME_PEAK * max(before.peak_bytes, after.peak_bytes), SAME_BYTES):
        return None
    terms = [
        MemoryTerm(category, before.peak.get(category, 0), after.peak.get(category, 0))
        for category in CATEGORIES
        if category != UNNAMED and before.peak.get(category, 0) != after.peak.get(category, 0)
    ]
    terms.sort(key=lambda term: -abs(term.after - term.before))
    unexplained = change - sum(term.after - term.before for term in terms)
    found = MemoryDifference(before.peak_bytes, after.peak_bytes, terms, unexplained, [])
    return MemoryDifference(
        found.before_bytes,
        found.after_bytes,
        terms,
        unexplained,
        [_in_terms(found, before, after), *_causes(before, after, abs(change))],
    )


def _in_terms(found: MemoryDifference, before: MemoryProfile, after: MemoryProfile) -> str:
    """The difference and its largest terms, each with its largest changes; smaller categories are summed up."""
    change = found.after_bytes - found.before_bytes
    shown = [term for term in found.terms[:TERMS] if abs(term.after - term.before) >= SMALL * abs(change)]
    parts = []
    for term in shown:
        listed = _details(term.category, before.allocations, after.allocations, term.after - term.before)
        text = f"{CATEGORIES[term.category]} {signed_bytes(term.after - term.before)}"
        parts.append(f"{text} ({', '.join(listed)})" if listed else text)
    small = sum(term.after - term.before for term in found.terms if term not in shown)
    if abs(small) >= SMALL * abs(change):
        parts.append(f"other categories {signed_bytes(small)}")
    if found.explained < COMPLETE:
        parts.append(f"unexplained {signed_bytes(found.unexplained_bytes)}")
    verb = "rose" if change > 0 else "fell"
    return (
        f"Peak memory {verb}, {byte_size(found.before_bytes)} → {byte_size(found.after_bytes)}"
        f" ({signed_bytes(change)}): {', '.join(parts)}"
    )


def _details(
    category: str, before: Sequence[AllocationEntry], after: Sequence[AllocationEntry], change: int
) -> list[str]:
    """The tensors and operators whose share of a category changed most, in either direction."""
    changes: Counter[str] = Counter()
    modules: dict[str, set[str]] = defaultdict(set)
    for sign, rows in ((-1, before), (1, after)):
        for row in rows:
            name = row.name or row.where or (UNNAMED_ROWS if row.module else "")
            if row.category == category and name:
                changes[name] += sign * row.bytes
                modules[name].add(row.module)
    named = sorted(changes, key=lambda name: -abs(changes[name]))[:DETAILS]
    return [
        f"{name}{_among(modules[name])} {signed_bytes(changes[name])}"
        for name in named
        if abs(changes[name]) >= SMALL * abs(change)
    ]


def _among(modules: set[str]) -> str:
    """The module of a change, or the number of its modules."""
    paths = modules - {""}
    return f" in {len(paths)} modules" if len(paths) > 1 else f" in {next(iter(paths))}" if paths else ""


# --- causes ----------------------------------------------------------------------------------------------------


def _causes(before: MemoryProfile, after: MemoryProfile, change: int) -> list[str]:
    """Sentences on causes that both profiles show and that explain at least `SMALL` of the difference."""
    enough = SMALL * change
    found = []
    pools, earlier = after.peak.get("graph_pools", 0), before.peak.get("graph_pools", 0)
    if abs(pools - earlier) >= enough:
        found.append(
            f"CUDA graphs keep {byte_size(pools)} between replays"
            f"{f' (before: {byte_size(earlier)})' if earlier else ''}: activations and temporaries of the captured work"
            " lie there, and no other work can use that memory"
        )
    found += _precision(before.saved, after.saved, enough)
    found += _kept(before, after, enough)
    casts = _casts(after.saved) - _casts(before.saved)
    if casts >= enough:
        found.append(f"Casts of parameters to lower precision are kept for backward: {byte_size(casts)}")
    return found


def _precision(before: Sequence[SavedEntry], after: Sequence[SavedEntry], enough: float) -> list[str]:
    """A sentence on saved tensors whose bytes moved from some dtypes to others; empty without one."""
    old, new = _by_dtype(before), _by_dtype(after)
    smaller = [name for name in new if new[name] - old.get(name, 0) >= enough]
    larger = [name for name in old if old[name] - new.get(name, 0) >= enough]
    if not smaller or not larger or set(smaller) == set(larger):
        return []
    now = " and ".join(f"{byte_size(new[name])} in {name}" for name in smaller)
    was = " and ".join(f"{byte_size(old[name] - new.get(name, 0))} in {name}" for name in larger)
    return [f"Backward is given {now} in place of {was}"]


def _by_dtype(rows: Iterable[SavedEntry]) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes[row.dtype] += row.bytes
    return sizes


def _kept(before: MemoryProfile, after: MemoryProfile, enough: float) -> list[str]:
    """A sentence on the numbers of tensors saved for backward, and why they differ; empty where a graph hides them."""
    replayed = [bool(found.peak.get("graph_pools")) and not found.saved for found in (before, after)]
    if any(replayed) or not (before.saved_known and after.saved_known):
        return []
    if abs(after.saved_bytes - before.saved_bytes) < enough:
        return []
    counts = [sum(row.count for row in found.saved) for found in (before, after)]
    numbers = (
        f"{counts[0]} tensors kept for backward ({byte_size(before.saved_bytes)}) became {counts[1]}"
        f" ({byte_size(after.saved_bytes)})"
    )
    fewer = _gone(before.saved, after.saved) if after.saved_bytes < before.saved_bytes else []
    compiled = _compiled(after) and not _compiled(before)
    why = ": the compiler chose what backward is given and computes the rest anew" if compiled else ""
    gone = f"; no longer kept: {', '.join(fewer)}" if fewer else ""
    return [numbers + why + gone]


def _compiled(found: MemoryProfile) -> bool:
    """Whether a compiled function saves most of the bytes that are saved for backward."""
    return 2 * sum(row.bytes for row in found.saved if row.compiled) > found.saved_bytes


def _gone(before: Sequence[SavedEntry], after: Sequence[SavedEntry]) -> list[str]:
    """Operators whose results are no longer saved for backward, those with most bytes first."""
    sizes: dict[str, int] = defaultdict(int)
    counts: Counter[str] = Counter()
    for sign, rows in ((1, before), (-1, after)):
        for row in rows:
            sizes[row.name] += sign * row.bytes
            counts[row.name] += sign * row.count
    named = sorted(((size, name) for name, size in sizes.items() if name and size > 0 and counts[name] > 0))
    return [f"results of {name} ({counts[name]}×, {byte_size(size)})" for size, name in reversed(named[-DETAILS:])]


def _casts(rows: Iterable[SavedEntry]) -> int:
    return sum(row.bytes for row in rows if row.name.startswith("cast of "))
