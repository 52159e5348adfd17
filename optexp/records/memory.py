"""Memory of one arm as data, as a record holds it. Needs no torch to be read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

# Categories in the order of a picture, from below, with their names for people.
CATEGORIES: Mapping[str, str] = {
    "parameters": "parameters and buffers",
    "optimizer_state": "optimizer state",
    "gradients": "gradients",
    "inputs": "inputs",
    "static_buffers": "static buffers of the step",
    "graph_pools": "pools of CUDA graphs",
    "workspace": "workspaces of libraries",
    "outputs": "outputs",
    "activations": "activations kept for backward",
    "temporaries": "temporaries",
    "rounding": "rounding by the allocator",
    "unknown": "unknown",
}
UNNAMED = "unknown"
SHOWN = 30  # rows of a table in the record
CLOSE = 0.01  # of a peak: categories that add up so nearly do add up


@dataclass(frozen=True)
class AllocationEntry:
    """Allocations of one place that are alive at the peak.

    name:   of the tensor (a parameter's, or the operator that made it); "" where nothing tells
    module: path of the module that was called, "" outside modules or in the model itself
    where:  file and line of the user's code, "" where no Python ran, as in backward on a GPU
    """

    category: str
    bytes: int
    count: int = 1
    name: str = ""
    module: str = ""
    where: str = ""


@dataclass(frozen=True)
class SavedEntry:
    """Tensors of one kind that one step keeps for backward; parameters and inputs themselves are not counted.

    bytes:    of all of them; memory that several share counts once
    name:     operator that made the tensor, or "cast of <parameter>"; "" where autograd does not tell
    module:   path of the module whose call keeps it
    compiled: a function of torch.compile keeps it
    """

    bytes: int
    shape: str
    dtype: str
    count: int = 1
    name: str = ""
    module: str = ""
    where: str = ""
    compiled: bool = False


@dataclass(frozen=True)
class CacheState:
    """torch's caching allocator after the recorded steps.

    reserved_bytes, allocated_bytes: taken from the driver, and given to tensors
    largest_free_bytes:              the largest piece that is reserved and free
    inactive_split_bytes:            free pieces beside used ones, which cannot go back to the driver
    driver_calls:                    of cudaMalloc (or of the mapping of memory) in each step
    """

    reserved_bytes: int
    allocated_bytes: int
    largest_free_bytes: int
    inactive_split_bytes: int
    driver_calls: float

    @property
    def fragmented_bytes(self) -> int:
        """Reserved and not allocated."""
        return self.reserved_bytes - self.allocated_bytes


@dataclass(frozen=True)
class MemoryTimeline:
    """Bytes by category over the recorded steps, at most at some hundred moments: the fullest of each stretch.

    at:    number of allocations and releases before each moment;  steps: the same at the begin of each step
    bytes: by category, one number for each moment
    """

    at: list[int]
    steps: list[int]
    bytes: dict[str, list[int]]


@dataclass(frozen=True)
class MemoryProfile:
    """Memory of one or two steady steps, recorded after timing.

    peak_bytes:       the highest level, without the tool's own tensors
    peak:             bytes by category at that moment, which add up to it
    allocations:      alive then, largest first
    saved:            tensors that one step keeps for backward, largest first;  saved_bytes: of all of them
    saved_known:      whether autograd's hooks could be used; a replayed graph keeps nothing that they see
    allocations_per_step: of the allocator, cached or not
    cache:            on a GPU
    """

    peak_bytes: int
    peak: dict[str, int]
    timeline: MemoryTimeline
    allocations: list[AllocationEntry] = field(default_factory=list)
    saved: list[SavedEntry] = field(default_factory=list)
    saved_bytes: int = 0
    saved_known: bool = True
    allocations_per_step: float = 0.0
    cache: CacheState | None = None

    @property
    def steps(self) -> int:
        """How many were recorded."""
        return len(self.timeline.steps)

    def reconciled(self, measured_bytes: float | None) -> MemoryProfile:
        """The same with the measured peak, which an earlier pass found: a difference above 1 % is unknown memory."""
        if measured_bytes is None or abs(measured_bytes - self.peak_bytes) <= CLOSE * measured_bytes:
            return self
        rest = round(measured_bytes) - self.peak_bytes
        peak = {**self.peak, UNNAMED: self.peak.get(UNNAMED, 0) + rest}
        return replace(self, peak=peak, peak_bytes=round(measured_bytes))

    def shortened(self) -> MemoryProfile:
        """The same with the largest rows of each table."""
        return replace(self, allocations=self.allocations[:SHOWN], saved=self.saved[:SHOWN])


@dataclass(frozen=True)
class MemoryTerm:
    """Bytes of one category at the peaks of baseline and candidate."""

    category: str
    before: int
    after: int


@dataclass(frozen=True)
class MemoryDifference:
    """Why the candidate's peak memory is another than the baseline's.

    terms:             largest change first, without unknown memory
    unexplained_bytes: of the difference, that no term covers
    sentences:         the same in words, with causes where they are known
    """

    before_bytes: int
    after_bytes: int
    terms: list[MemoryTerm]
    unexplained_bytes: int
    sentences: list[str]

    @property
    def explained(self) -> float:
        """Share of the difference that named terms cover."""
        return 1 - abs(self.unexplained_bytes) / abs(self.after_bytes - self.before_bytes)
