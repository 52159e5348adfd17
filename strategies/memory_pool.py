"""Memory pools: the allocator that a step's memory comes from, and the cost of allocation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from optexp.program import Batch, Outputs, Program, Step, preserved
from optexp.schema import choice
from optexp.strategy import BITWISE, Contract, Counters, Evidence, Notes, Stage, Strategy

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace

SETTINGS = {"expandable": "expandable_segments:True", "async": "backend:cudaMallocAsync"}
MIB = 2**20


@dataclass
class MemoryPool(Strategy):
    """Changes the allocator, or shares scratch memory.

    kind:  private: a torch.cuda.MemPool for all allocations of the step's thread, graphs included; expandable: segments
           that grow; async: the driver's own pool; none: no pool, so that every tensor is a cudaMalloc and a cudaFree;
           emptied: cached memory is returned to the driver after every step; workspace: modules with scratch memory in
           `self.workspace` share it

    `async`, `none` and `emptied` exclude strategies that capture: without a cache a graph cannot allocate, and memory
    that the driver's pool gives to graphs cannot be counted.
    """

    stage = Stage.MEMORY
    variants = ({"kind": "expandable"}, {"kind": "async"}, {"kind": "workspace"})

    kind: str = choice("private", "expandable", "async", "none", "emptied", "workspace")

    @property
    def contract(self) -> Contract:
        return BITWISE

    @property
    def excludes(self) -> frozenset[str]:
        if self.kind in ("workspace", "private"):
            # workspace: with streams, two modules would use the shared memory at once. private: while a thread
            # allocates from a pool, torch never frees memory that crossed streams, as during capture.
            return frozenset({"streams", "graph_trees"})
        return frozenset({"capture"} if self.kind in ("async", "none", "emptied") else ())

    def environment(self) -> Mapping[str, str]:
        if self.kind == "none":
            return {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        # The variable's name since torch 2.9, and its older name, which a user may have set.
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        return dict.fromkeys(names, SETTINGS[self.kind]) if self.kind in SETTINGS else {}

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """Allocations by the driver take no time; None on a CPU."""
        step = view.parts(ceilings)
        if not step.on_gpu:
            return None
        allocating = step.allocating_us
        return step.less(f"no cudaMalloc and cudaFree, {step.share(allocating)}", waiting=allocating)

    def unsupported_on(self, device: torch.device) -> str | None:
        if self.kind != "workspace" and device.type != "cuda":
            return (
                f"pools are of torch's CUDA allocator, and this run is on the {device.type.upper()}: use device=cuda on"
                " a machine with an NVIDIA GPU, or kind=workspace for modules that keep scratch memory"
            )
        return None

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if self.kind != "workspace" or len(workspaces_of(program.model)) > 1:
            return self.unsupported_on(device)
        with preserved(program):  # some make theirs in the first step
            program.run()
            count = len(workspaces_of(program.model))
        if count > 1:
            return None
        kept = "one module keeps" if count else "no module keeps"
        return f"{kept} scratch memory as `self.workspace`, and sharing takes two: leave memory_pool out"

    def apply(self, program: Program) -> tuple[Program, Notes]:
        if self.kind == "private":
            pool = torch.cuda.MemPool()
            program = replace(program, pool=pool, step=within(pool, program.step))
        elif self.kind == "emptied":
            program = replace(program, step=emptying(program.step))
        shared: Notes = {}
        workspaces: dict[nn.Module, Tensor] = {}
        with preserved(program):
            program.run()
            if self.kind == "workspace":
                shared = share_workspaces(program.model)
                workspaces = {m: w for m in program.model.modules() if (w := vars(m).get("workspace")) is not None}
        if self.kind == "workspace":
            for module, workspace in workspaces.items():  # `preserved` restored the old ones
                vars(module)["workspace"] = workspace
            return program, shared
        segments = torch.cuda.memory_snapshot() if torch.cuda.get_allocator_backend() == "native" else []
        return program, {
            "backend": torch.cuda.get_allocator_backend(),
            "expandable": sum(bool(segment.get("is_expandable")) for segment in segments),
            "private": sum(s["total_size"] for s in segments if program.pool and in_pool(s, program.pool)),
        }

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        match self.kind:
            case "workspace":
                count, (had, has) = notes["modules"], notes["bytes"]
                if count < 2:
                    return Evidence(False, f"{count} modules keep scratch memory as `self.workspace`: none to share")
                return Evidence(True, f"{count} modules share {has / MIB:.3g} MiB of workspace, not {had / MIB:.3g}")
            case "private":
                found = notes["private"]
                return Evidence(bool(found), f"{found / MIB:.3g} MiB of a step's memory lie in a pool of its own")
            case "expandable":
                return Evidence(bool(notes["expandable"]), f"{notes['expandable']} segments can grow")
            case "async":
                calls, backend = after.calls("cudaMallocAsync"), notes["backend"]
                text = f"allocator {backend}, {calls:g} calls of cudaMallocAsync a step"
                return Evidence(backend == "cudaMallocAsync", text)
        names = ("cudaMalloc", "cudaFree")
        had, has = (sum(map(trace.calls, names)) for trace in (before, after))
        if self.kind == "emptied" and not has:
            return Evidence(False, "the step gave nothing back: in all memory that is cached something is still in use")
        return Evidence(has > had, f"{has:g} calls of cudaMalloc and cudaFree a step, not {had:g}")

    def recipe(self, notes: Notes) -> str:
        recipes = {"private": PRIVATE, "emptied": EMPTIED, "workspace": "share_workspaces(model)  # after a first step"}
        return recipes.get(self.kind, "# the variables at the top are all it takes")


PRIVATE = """\
mempool = torch.cuda.MemPool()
pool = mempool.id


def step(batch, plain=step):
    if torch.cuda.is_current_stream_capturing():
        return plain(batch)
    with torch.cuda.use_mem_pool(mempool):
        return plain(batch)
"""

EMPTIED = """\
def step(batch, plain=step):
    result = plain(batch)
    torch.cuda.empty_cache()
    return result
"""


def within(pool: torch.cuda.MemPool, step: Step) -> Step:
    """The step with allocations from `pool`. During capture the graph itself uses the pool."""

    def pooled(program: Program, batch: Batch) -> Outputs:
        if torch.cuda.is_current_stream_capturing():
            return step(program, batch)
        with torch.cuda.use_mem_pool(pool):
            return step(program, batch)

    return pooled


def emptying(step: Step) -> Step:
    def emptied(program: Program, batch: Batch) -> Outputs:
        outputs = step(program, batch)
        torch.cuda.empty_cache()
        return outputs

    return emptied


def in_pool(segment: Mapping[str, Any], pool: torch.cuda.MemPool) -> bool:
    return tuple(segment.get("segment_pool_id", ())) == tuple(pool.id)


def workspaces_of(model: nn.Module) -> list[tuple[nn.Module, Tensor]]:
    """Modules that keep scratch memory as `self.workspace`, and that memory."""
    return [(m, w) for m in model.modules() if isinstance(w := vars(m).get("workspace"), Tensor)]


def share_workspaces(model: nn.Module) -> dict[str, Any]:
    """Give all modules with a workspace one common workspace, as large as the largest; they use it in turn."""
    kept = workspaces_of(model)
    largest: dict[Any, int] = {}
    for _, w in kept:
        largest[w.dtype, w.device] = max(extent(w), largest.get((w.dtype, w.device), 0))
    shared = {(dtype, device): torch.empty(n, dtype=dtype, device=device) for (dtype, device), n in largest.items()}
    for module, w in kept:
        common = shared[w.dtype, w.device].as_strided(w.shape, w.stride())
        module.workspace = common  # type: ignore[assignment]
    nbytes = [sum(extent(w) * w.itemsize for _, w in kept), sum(w.nbytes for w in shared.values())]
    return {"modules": len(kept), "bytes": nbytes}


def extent(tensor: Tensor) -> int:
    """Number of elements between a tensor's first and last element in memory, gaps included."""
    steps = (stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return 1 + sum(steps) if tensor.numel() else 0
