"""torch.compile's work on one arm as data, as a record holds it. Needs no torch to be read."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class GraphBreak:
    """A line at which a graph ended.

    place:   "net.py:12";  code: the line itself, "" where it is unknown
    graphs:  graphs that ended there, one for each variant of the function
    resumed: the code after it was compiled as a graph of its own; else the whole function runs uncompiled
    """

    place: str
    cause: str
    graphs: int = 1
    resumed: bool = True
    code: str = ""


@dataclass(frozen=True)
class Recompile:
    """A guard for which a function was compiled anew.

    function: with the line that it begins at, "forward (net.py:10)"
    varied:   the varying thing, "value of self.position"
    place:    line that the guard is about, "" where it is unknown
    guards:   the guards that failed, as code, one of each
    limited:  torch's limit was reached: further variants run uncompiled
    """

    function: str
    varied: str
    place: str = ""
    times: int = 1
    guards: list[str] = field(default_factory=list)
    limited: bool = False


@dataclass(frozen=True)
class CudaGraphSkip:
    """A reason for which Inductor replayed no CUDA graph.  graphs: compiled graphs it was said of"""

    reason: str
    graphs: int = 1


@dataclass(frozen=True)
class CompiledGraph:
    """One graph and direction that torch.compile compiled. Figures are None where the log does not tell them.

    id:             Dynamo's number of function and variant, "0/1"
    direction:      "forward", "backward" or "inference"
    function:       with the line that it begins at, "forward (net.py:10)"
    captured_ops:   calls in the FX graph as captured from Python; of the joint graph's backward part in "backward"
    aten_ops:       ATen operators of the FX graph as transformed
    ir_before, ir_after: nodes of Inductor's scheduler before and after fusion
    kernels:        launches of generated kernels in one call;  library_calls: calls of libraries and of ATen
    bytes_unfused:  estimate: each ATen operator reads its inputs and writes its outputs
    bytes_before, bytes_after: estimate: the same of each node of the IR before and after fusion
    cached:         compiled by an earlier process, and taken from the cache
    files:          text files by stage, relative to the result's folder
    """

    id: str
    direction: str
    function: str = ""
    captured_ops: int | None = None
    aten_ops: int | None = None
    ir_before: int | None = None
    ir_after: int | None = None
    kernels: int | None = None
    library_calls: int | None = None
    bytes_unfused: int | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    cached: bool = False
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class DeviceLimits:
    """Limits of one multiprocessor that bound how many blocks it holds at once."""

    multiprocessors: int
    threads: int
    registers: int
    shared_bytes: int
    blocks: int
    warp: int = 32


@dataclass(frozen=True)
class KernelResources:
    """A kernel of a step, for one launch configuration.

    origin:         "Inductor", "Triton", "CUDA C++" or "library"
    registers:      of a thread;  spills: of them that were written to memory, as Triton or the compiler counts them
    shared_bytes:   of a block, static and dynamic
    occupancy:      resident warps by those that a multiprocessor can hold: theoretical, from these resources
    limited_by:     resource that bounds occupancy: "registers", "shared memory", "threads" or "blocks"
    blocks_per_sm:  blocks that a multiprocessor holds at once
    waves:          blocks of the grid by those that the device holds at once
    files:          "ptx" and "sass", relative to the result's folder
    """

    name: str
    origin: str
    grid: str
    block: str
    calls: float
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    occupancy: float | None = None
    limited_by: str = ""
    blocks_per_sm: int | None = None
    waves: float | None = None
    files: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CompilerEvidence:
    """Compilations in one arm.  log: folder that `tlparse` reads, relative to the result's folder"""

    graphs: list[CompiledGraph] = field(default_factory=list)
    breaks: list[GraphBreak] = field(default_factory=list)
    recompiles: list[Recompile] = field(default_factory=list)
    skips: list[CudaGraphSkip] = field(default_factory=list)
    kernels: list[KernelResources] = field(default_factory=list)
    log: str = ""

    def __bool__(self) -> bool:
        return bool(self.graphs or self.breaks or self.recompiles or self.skips or self.kernels)
