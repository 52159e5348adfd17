"""Memory by category: a timeline, the composition of the peak, and tensors kept for backward, from lives of memory."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from optexp.profiling.allocations import Call, Held, History, Sighting, identify, modules_at
from optexp.records.memory import (
    CATEGORIES,
    CLOSE,
    AllocationEntry,
    CacheState,
    MemoryProfile,
    MemoryTimeline,
    SavedEntry,
)

MOMENTS = 240  # of a timeline in a record
ROWS = 400  # of a table, before a record shortens it


@dataclass
class Recording:
    """Events and sightings of an arm over a few steps.

    steps:     number of events before each step
    owned:     finds the tensors that Python holds after the steps: shape and dtype in words, by address
    pools:     bytes that CUDA graphs hold although the allocator calls them free
    allocated, requested: the allocator's own peaks in bytes; None for an allocator that counts none
    saved_known: whether the tensors saved for backward were recorded
    """

    history: History
    steps: list[int]
    sightings: list[Sighting] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)
    owned: Callable[[], Mapping[int, str]] = dict
    pools: int = 0
    allocated: int | None = None
    requested: int | None = None
    saved_known: bool = True
    cache: CacheState | None = None


@dataclass(frozen=True)
class Piece:
    """A life with its category and names."""

    held: Held
    category: str
    name: str
    module: str

    @property
    def bytes(self) -> int:
        return self.held.life.bytes


def memory_profile(recording: Recording) -> MemoryProfile:
    """Tables and timeline of a recording."""
    history = recording.history
    pieces = _pieces(recording)
    shown = [piece for piece in pieces if piece.category != "tool"]
    levels = _levels(shown, len(history.events))
    peak_at = max(range(recording.steps[0], len(levels)), key=levels.__getitem__)
    alive = [piece for piece in pieces if piece.held.life.alive(peak_at)]
    beyond = _beyond(recording, alive)
    ours = [piece for piece in alive if piece.category != "tool"]
    peak = _composition(ours, beyond)
    saved = _saved(pieces, recording.steps[-1])
    return MemoryProfile(
        peak_bytes=sum(peak.values()),
        peak=peak,
        timeline=_timeline(shown, levels, recording.steps, beyond),
        allocations=_allocations(ours),
        saved=saved,
        saved_bytes=sum(row.bytes for row in saved),
        saved_known=recording.saved_known,
        allocations_per_step=sum(event.bytes > 0 for event in history.events[recording.steps[0] :])
        / len(recording.steps),
        cache=recording.cache,
    )


def _pieces(recording: Recording) -> list[Piece]:
    history = recording.history
    births = [index for index, event in enumerate(history.events) if event.bytes > 0]
    modules = modules_at(recording.calls, births)
    found = identify(history.lives(), recording.sightings)
    unseen = [held for held in found if held.seen is None and held.life.died is None]  # and never released
    owners = recording.owned() if unseen else {}  # slow: a search of all objects
    pieces = []
    for held in found:
        life, seen = held.life, held.seen
        name = seen.name if seen else owners.get(life.address, "") if life.died is None else ""
        module = (seen.module if seen else "") or modules.get(life.born, "")
        pieces.append(Piece(held, _category(held, history.pooled, owners), name or life.op, module))
    return pieces


def _category(held: Held, pooled: Collection[int], owners: Collection[int]) -> str:
    """Memory without a sighting is a temporary if the steps release it; else its owner decides."""
    life = held.life
    if held.seen is not None:
        return held.seen.category
    if life.died is not None:
        return "temporaries"
    if life.address in pooled:
        return "graph_pools"
    return "unknown" if life.address in owners else "workspace"


def _levels(pieces: Sequence[Piece], events: int) -> list[int]:
    """Bytes in use after each number of events."""
    changes = _changes(pieces, events)
    levels, level = [], 0
    for change in changes:
        level += sum(change.values())
        levels.append(level)
    return levels


def _changes(pieces: Sequence[Piece], events: int) -> list[dict[str, int]]:
    """Changes of bytes by category at each event; the first entry is the memory before all events."""
    changes: list[dict[str, int]] = [defaultdict(int) for _ in range(events + 1)]
    for piece in pieces:
        life = piece.held.life
        changes[life.born + 1][piece.category] += life.bytes
        if life.died is not None:
            changes[life.died + 1][piece.category] -= life.bytes
    return changes


def _beyond(recording: Recording, alive: Sequence[Piece]) -> dict[str, int]:
    """Bytes at the peak without events: pools of graphs, and the allocator's own peak beyond the sum of the events.

    That rest_bytes is rounding if the requests add up to the allocator's peak of requests; else its cause is unknown.
    """
    beyond = {"graph_pools": recording.pools}
    if recording.allocated is not None and recording.requested is not None:
        rest_bytes = recording.allocated - sum(piece.bytes for piece in alive)
        requested = sum(piece.held.life.requested for piece in alive)
        complete = abs(requested - recording.requested) <= CLOSE * recording.requested
        beyond["rounding" if complete and rest_bytes >= 0 else "unknown"] = rest_bytes
    return {category: size for category, size in beyond.items() if size}


def _composition(pieces: Sequence[Piece], beyond: Mapping[str, int]) -> dict[str, int]:
    found: Counter[str] = Counter(beyond)
    for piece in pieces:
        found[piece.category] += piece.bytes
    return {category: found[category] for category in CATEGORIES if found[category]}


def _timeline(
    pieces: Sequence[Piece], levels: Sequence[int], steps: Sequence[int], beyond: Mapping[str, int]
) -> MemoryTimeline:
    """Memory from the first step on: of each stretch of events, the moment with most bytes."""
    first, end = steps[0], len(levels)
    stretch = max(1, -(-(end - first) // MOMENTS))
    moments = [
        max(range(begin, min(begin + stretch, end)), key=levels.__getitem__) for begin in range(first, end, stretch)
    ]
    level: Counter[str] = Counter(beyond)
    rows, changes = [], _changes(pieces, end - 1)
    chosen = set(moments)
    for at, change in enumerate(changes):
        level.update(change)
        if at in chosen:
            rows.append(dict(level))
    named = [category for category in CATEGORIES if any(row.get(category) for row in rows)]
    columns = {category: [row.get(category, 0) for row in rows] for category in named}
    return MemoryTimeline([at - first for at in moments], [step - first for step in steps], columns)


def _allocations(alive: Sequence[Piece]) -> list[AllocationEntry]:
    groups: dict[tuple[str, str, str, str], list[int]] = defaultdict(list)
    for piece in alive:
        seen = piece.held.seen
        where = piece.held.life.where or (seen.where if seen else "")
        groups[piece.category, piece.name, piece.module, where].append(piece.bytes)
    rows = [
        AllocationEntry(category, sum(sizes), len(sizes), name, module, where)
        for (category, name, module, where), sizes in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)[:ROWS]


def _saved(pieces: Sequence[Piece], begin: int) -> list[SavedEntry]:
    """Tensors that the last step saves for backward; each allocation counts once, at its first sighting."""
    groups: dict[tuple[str, str, str, str, str, bool], list[int]] = defaultdict(list)
    for piece in pieces:
        first = next((seen for seen in piece.held.saved if seen.at >= begin), None)
        if first is not None and piece.category == "activations":
            key = (first.shape, first.dtype, first.name, first.module, first.where, first.compiled)
            groups[key].append(piece.held.life.requested)
    rows = [
        SavedEntry(sum(sizes), shape, dtype, len(sizes), name, module, where, compiled)
        for (shape, dtype, name, module, where, compiled), sizes in groups.items()
    ]
    return sorted(rows, key=lambda row: -row.bytes)[:ROWS]
