"""Lives of allocations, from the events of an allocator, and the tensors that were seen in each allocation.

Nothing here needs a GPU: a snapshot is the dictionary of `torch.cuda.memory._snapshot`.
"""

from __future__ import annotations

import re
import sys
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

GRAIN = 512  # bytes: the allocator of a GPU rounds requests up to a multiple


@dataclass(frozen=True, slots=True)
class Event:
    """An allocation (positive bytes) or a release (negative).

    requested: bytes that the program asked for, without the allocator's rounding
    where:     file and line of the user's code;  op: innermost operator or backward function, where known
    """

    address: int
    bytes: int
    requested: int = 0
    where: str = ""
    op: str = ""


@dataclass(frozen=True, slots=True)
class Life:
    """One allocation, from its allocation event to its release.

    born: index of the allocation event; -1: before the first event
    died: index of the release event; None: never released
    """

    address: int
    bytes: int
    born: int = -1
    died: int | None = None
    requested: int = 0
    where: str = ""
    op: str = ""

    def alive(self, at: int) -> bool:
        """Whether it is alive after `at` events."""
        return self.born < at and (self.died is None or self.died >= at)


@dataclass(frozen=True, slots=True)
class Sighting:
    """A tensor that was seen at an address.

    at:       number of events before the sighting
    shape, dtype, module, where: known for tensors that are saved for backward
    compiled: saved by code of torch.compile
    """

    at: int
    address: int
    category: str
    name: str = ""
    module: str = ""
    where: str = ""
    shape: str = ""
    dtype: str = ""
    compiled: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A module's forward call; `begin` and `end` count the events before its start and its end."""

    begin: int
    end: int
    module: str


@dataclass
class History:
    """Events of the recorded steps, and allocations that are older.

    before:  older allocations by address
    pooled:  addresses in private pools of CUDA graphs
    """

    events: list[Event] = field(default_factory=list)
    before: dict[int, Event] = field(default_factory=dict)
    pooled: set[int] = field(default_factory=set)

    def lives(self) -> list[Life]:
        """Every piece of memory that is alive at any time, by birth."""
        born = dict.fromkeys(self.before, -1)  # index of birth by address in use
        lives_ = []
        for index, event in enumerate(self.events):
            if event.address in born:  # released, or allocated again without a reported release
                lives_.append(self._life(event.address, born.pop(event.address), index))
            if event.bytes > 0:
                born[event.address] = index
        lives_ += [self._life(address, index, None) for address, index in born.items()]
        return sorted(lives_, key=lambda life: life.born)

    def _life(self, address: int, born: int, died: int | None) -> Life:
        event = self.before[address] if born < 0 else self.events[born]
        return Life(address, event.bytes, born, died, event.requested or event.bytes, event.where, event.op)


def history_of(snapshot: Mapping[str, Any], device: int) -> History:
    """The history in a snapshot of the CUDA allocator.

    Args:
        snapshot: As `torch.cuda.memory._snapshot` returns it, with a trace of all events since recording began.
        device: Index of the GPU.
    """
    segments = [segment for segment in snapshot["segments"] if segment.get("device", device) == device]
    blocks = {
        address: block
        for segment in segments
        for address, block in _blocks(segment)
        if block["state"] == "active_allocated"
    }
    history = History(
        pooled={
            address
            for segment in segments
            if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
            for address, _ in _blocks(segment)
        }
    )
    last: dict[int, int] = {}
    for entry in snapshot["device_traces"][device]:
        address, size = entry.get("addr", 0), entry["size"]
        if entry["action"] == "alloc":
            last[address] = len(history.events)
            frames = ((frame["filename"], frame["line"]) for frame in entry.get("frames", ()))
            history.events.append(Event(address, _rounded(size), size, user_line(frames)))
        elif entry["action"] == "free_requested":
            if last.pop(address, None) is None:
                history.before[address] = Event(address, _rounded(size), size)
            history.events.append(Event(address, -_rounded(size), size))
    for address, block in blocks.items():
        if address in last:
            event = history.events[last[address]]
            history.events[last[address]] = Event(address, block["size"], event.requested, event.where)
        else:
            history.before[address] = Event(address, block["size"], block.get("requested_size", 0))
    return history


def largest_free(snapshot: Mapping[str, Any], device: int) -> int:
    """Bytes of the largest free block of reserved memory."""
    segments = [segment for segment in snapshot["segments"] if segment.get("device", device) == device]
    free = [block["size"] for segment in segments for _, block in _blocks(segment) if block["state"] == "inactive"]
    return max(free, default=0)


def _blocks(segment: Mapping[str, Any]) -> Iterable[tuple[int, Mapping[str, Any]]]:
    """Blocks with their addresses. Older versions of torch omit addresses; blocks are contiguous."""
    address = segment["address"]
    for block in segment["blocks"]:
        yield block.get("address", address), block
        address += block["size"]


def _rounded(size: int) -> int:
    return max(-(-size // GRAIN), 1) * GRAIN


# --- what memory holds -----------------------------------------------------------------------------------------

PRECEDENCE = (  # the first of several categories that one allocation was seen as counts
    "tool", "parameters", "optimizer_state", "inputs", "gradients", "static_buffers", "activations", "outputs",
)  # fmt: skip


@dataclass(frozen=True)
class Held:
    """A life with the sighting that decides its category (`seen`) and all sightings by autograd (`saved`)."""

    life: Life
    seen: Sighting | None
    saved: list[Sighting]


def identify(lives: Sequence[Life], sightings: Iterable[Sighting]) -> list[Held]:
    """Each life with its sightings; a sighting that no life covers is dropped."""
    by_address: dict[int, list[int]] = defaultdict(list)
    for index, life in enumerate(lives):
        by_address[life.address].append(index)
    seen: dict[int, Sighting] = {}
    saved: dict[int, list[Sighting]] = defaultdict(list)
    for sighting in sightings:
        for index in reversed(by_address.get(sighting.address, ())):
            if lives[index].alive(sighting.at):
                if sighting.category == "activations":
                    saved[index].append(sighting)
                known = seen.get(index)
                if known is None or _rank(sighting) < _rank(known):
                    seen[index] = sighting
                break
    return [Held(life, seen.get(index), saved.get(index, [])) for index, life in enumerate(lives)]


def _rank(sighting: Sighting) -> tuple[int, bool]:
    return PRECEDENCE.index(sighting.category), not sighting.name


def modules_at(calls: Sequence[Call], moments: Sequence[int]) -> dict[int, str]:
    """The innermost module that was being called when each event happened; events outside calls are left out.

    Args:
        calls: Nested calls, in any order.
        moments: Indices of events, ascending.
    """
    modules: dict[int, str] = {}
    for call in sorted(calls, key=lambda call: call.begin - call.end):  # the longest first: inner ones overwrite
        for index in moments[bisect_left(moments, call.begin) : bisect_left(moments, call.end)]:
            modules[index] = call.module
    return modules


# --- lines of code ---------------------------------------------------------------------------------------------

_OURS = f"{__file__.rpartition('/optexp/')[0]}/"
_LIBRARY = re.compile(
    r"(torch|triton|concurrent|multiprocessing|importlib|optexp/(?!workloads/|strategies/|kernels/)\w+)(/|\.py$)"
    r"|optexp/__|<|frozen |\S*/lib/python3\.\d+/"
)
LONG = 36  # characters: longer file names are shortened


def user_line(frames: Iterable[tuple[str, int]]) -> str:
    """Folder, file and line of the innermost frame that is neither torch's nor this tool's; "" without one.

    Args:
        frames: File, absolute or as `torch.profiler` shortens it, and line, innermost first.
    """
    for file, line in frames:
        short = re.split(r"/(?:site|dist)-packages/", file.removeprefix(_OURS))[-1]
        if not _LIBRARY.match(short) and short.removesuffix(".py") not in sys.stdlib_module_names:
            folder, _, file_name = short.rpartition("/")
            if len(file_name) > LONG:  # a hash, as of generated code
                file_name = f"{file_name[:8]}….{file_name.rpartition('.')[2]}"
            return f"{folder.rpartition('/')[2]}/{file_name}:{line}".removeprefix("/")
    return ""
