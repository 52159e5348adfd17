"""Answers of workers that are more than a number, a string or a list of them. `optexp.workers.wire` carries them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from optexp.strategy import Notes


@dataclass(frozen=True)
class Look:
    """How an arm takes and observes one step.

    step:      index of the fresh batch
    restore:   the step starts from the restored state; else from the state that the step before left
    noise:     seed of noise inside the model; None for none
    forward:   the forward pass alone
    order:     seed of a reassociated run; None for the program's own order of sums
    repeating: under torch's deterministic algorithms
    """

    step: int
    restore: bool = True
    noise: int | None = None
    forward: bool = False
    order: int | None = None
    repeating: bool = False


@dataclass(frozen=True)
class WorkloadInfo:
    """Properties of a workload that only a process which has built it knows.

    samples: that one step processes
    remarks: of the workload, for people
    built:   a checksum of every parameter and buffer: a model that differs from process to process proves nothing
    kept_modes: by module of its model, whether `model.train` or `model.eval` changes its mode
    """

    samples: int
    remarks: list[str] = field(default_factory=list)
    built: dict[str, str] = field(default_factory=dict)
    kept_modes: Mapping[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Identity:
    """An arm's part in the comparison.

    strategies: labels of those that it was built of
    texts:      digests of the user's files that it has run, by path
    """

    name: str
    strategies: list[str]
    texts: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SetUp:
    """A program that was built, folded over its stack and run for the first time.

    setup_s:     seconds to the first result;  inherited_s: of them, before the arm was forked
    notes:       of each strategy, by name
    random:      a step draws random numbers
    batch_bytes: mean size of a batch
    queue:       batches that the feed takes ahead
    turn:        distinct batches that take turns;  sized: how many sizes these have
    varied:      parameters that have other values than they begin with
    carries:     steps change buffers, which the next one may begin with
    keeps:       names of Python state of the model that every step changes
    plan:        index in `memory_plan.PLANS` that this arm needs
    step_s:      seconds of the fastest first step;  compute_s: the same without its feed
    own_step:    the user's code trains, by a step or an optimizer of its own
    rebuilt:     a strategy put another workload in the place of the first one
    phases:      seconds of each phase of the set-up, in order
    """

    setup_s: float
    notes: dict[str, Notes]
    random: bool
    batch_bytes: float
    queue: int
    turn: int
    varied: list[str]
    carries: bool
    keeps: list[str]
    plan: int
    step_s: float
    compute_s: float
    workload: WorkloadInfo
    own_step: bool = False
    rebuilt: bool = False
    sized: int = 1
    phases: dict[str, float] = field(default_factory=dict)
    inherited_s: float = 0.0


@dataclass(frozen=True)
class Given:
    """One batch that a feed gave, by its inputs' names.

    shapes, dtypes: of each input
    means:          of each real input
    digest:         of all values
    """

    shapes: dict[str, list[int]]
    dtypes: dict[str, str]
    means: dict[str, float]
    digest: str


@dataclass(frozen=True)
class Fed:
    """The first batches that a feed gives.

    loads:   a data loader makes them; else the core has drawn them
    epoch:   number of a loader's batches in an epoch;  samples: of its samples. None where it does not know
    batches: as many as a few seconds give, in order
    """

    loads: bool
    epoch: int | None
    samples: int | None
    batches: list[Given]


@dataclass(frozen=True)
class WarmUp:
    """A program that runs steadily.

    alone_s:  seconds of single steps, each waited for
    timer_s:  seconds that timing nothing takes
    queue:    batches that the feed takes ahead
    constant: inputs that hold one value over and over
    """

    alone_s: list[float]
    timer_s: float
    queue: int
    constant: list[str]


@dataclass(frozen=True)
class PeakMemory:
    """MiB over steady steps; None where nothing counts it.

    peak_mib:     allocated on the device, what graphs hold included
    reserved_mib: by torch's caching allocator
    pools_mib:    held by graphs alone
    pinned_mib:   page-locked memory of the host
    resident_mib: on a CPU, tensors that live between steps
    process_mib:  of the whole process, by the driver's count
    """

    peak_mib: float | None = None
    reserved_mib: float | None = None
    pools_mib: float | None = None
    pinned_mib: float | None = None
    resident_mib: float | None = None
    process_mib: float | None = None

    def metrics(self) -> dict[str, float]:
        """The known ones, as a record names them."""
        return {f"memory_{name}": value for name, value in asdict(self).items() if value is not None}


@dataclass(frozen=True)
class KernelCode:
    """Compiled code of one Triton kernel that ran.

    origin: "Inductor" or "Triton";  warps: of a block;  registers: of a thread;  shared: bytes of a block
    spills: as Triton counts them
    files:  names in the folder of code, by "ptx" and "sass"
    """

    name: str
    origin: str
    warps: int
    registers: int | None = None
    spills: int | None = None
    shared: int | None = None
    files: dict[str, str] = field(default_factory=dict)
