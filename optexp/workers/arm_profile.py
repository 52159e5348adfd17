"""ARM: memory, traces and compiled code. Leftover tracing slows later steps, so nothing is timed afterwards."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from optexp.errors import first_line
from optexp.kernelkit.toolchain import counted
from optexp.measurement import clock
from optexp.measurement.recorder import LONGEST_S, WARMUP
from optexp.program import tensors_of
from optexp.strategy import Strategy
from optexp.support import sparse
from optexp.support.wrapped import nbytes
from optexp.trace import record, record_once
from optexp.workers.arm_ranges import Ranges
from optexp.workers.line_marks import lines_marked
from optexp.workers.messages import PeakMemory
from optexp.workers.module_marks import markable, marked


class Profiling(Ranges):
    """Peak memory, counters and a trace of steady steps."""

    def counters(self) -> dict[str, float]:
        """Counters of torch's compiler so far, and this process's cores."""
        return counted() | {"process/cores": float(len(os.sched_getaffinity(0)))}

    def peak_memory(self, steps: int) -> PeakMemory:
        """Peak memory over steady steps: of the device; on a CPU only tensors that live between them.

        What graphs hold counts whole (see `held_by_graphs`). What is here for the tool's sake, batches but one and the
        state to restore, does not. Empty where torch's allocator is switched off, and counts nothing.
        """
        self.fresh, self.brought = [], None
        self.inbox.clear()
        self.restore()
        one, *others = [list(tensors_of(batch).values()) for batch in self.batches]
        if self.device.type != "cuda":
            model, named = self.program.model, self.program.state()  # which leaves out what has no alias
            rest = [tensor for name, tensor in named.items() if not name.startswith(("param/", "buffer/"))]
            self.run()  # leaves its gradients, if the next step finds any
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            living = (*model.parameters(), *model.buffers(), *rest, *grads, *one)
            return PeakMemory(resident_mib=sum(map(nbytes, living)) / 2**20)
        kept = self.program.keeps.tensors if self.program.keeps is not None else []
        ours = [*(t for tensors in others for t in tensors), *self.initial.values.values(), *kept]
        overhead = sum(sparse.nbytes(t) for t in ours if t.device.type == "cuda")
        self.restore()
        clock.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        run = self.runner()
        for _ in range(steps):
            run()
        clock.synchronize(self.device)
        if not torch.cuda.max_memory_allocated(self.device) and ours:
            return PeakMemory()
        pools = held_by_graphs(self.program.pool)
        return PeakMemory(
            peak_mib=(torch.cuda.max_memory_allocated(self.device) + pools - overhead) / 2**20,
            reserved_mib=torch.cuda.max_memory_reserved(self.device) / 2**20,
            pools_mib=pools / 2**20,
            pinned_mib=torch.cuda.host_memory_stats().get("allocated_bytes.peak", 0) / 2**20,
        )

    def profile(
        self,
        path: str,
        steps: int,
        wait: int = 0,
        warmup: int = WARMUP,
        exactly: bool = False,
        longest_s: float = LONGEST_S,
    ) -> dict[str, float]:
        """Write a Chrome trace of steady steps, at least one for each batch; returns the counters at the end.

        Args:
            wait: Steps before the profiler starts.
            warmup: Steps that it drops.
            exactly: So many steps, however many batches there are and however slow they are.
            longest_s: Most time of the traced steps.
        """
        self.restore()
        steps = steps if exactly else max(steps, len(self.batches))
        run = self.runner()
        for _ in range(max(3, self.program.feed.queue) + wait):
            run()
        with self.in_phases() as marked:
            record(marked, steps, Path(path), self.device, warmup, exactly, longest_s)
        return self.counters()

    def profile_modules(self, path: str, steps: int) -> bool:
        """The same with a range around each module's forward call; False where modules cannot be marked.

        The ranges cost host time, so that nothing but the share of each module is read from this trace.
        """
        if not markable(self.program.model):
            return False
        self.restore()
        run = self.runner()
        run()
        with marked(self.program.model):
            record(run, steps, Path(path), self.device)
        return True

    def profile_places(self, path: str) -> bool:
        """Write a trace of one step with ranges around modules' calls and lines of the user's code.

        The ranges cost host time, so that only the place of each operator and call is read from this trace. Returns
        False where modules cannot be marked: tracing lines would compile a compiled model anew, too.
        """
        if not markable(self.program.model):
            return False
        self.restore()
        run = self.runner()
        run()
        with marked(self.program.model), lines_marked():
            record_once(run, Path(path), self.device)
        return True

    def refusals(self, packed: bytes) -> list[str]:
        """Why this program, as it is now, would refuse each of these strategies; empty where it would not."""
        return [self._refusal(strategy) for strategy in cloudpickle.loads(packed)]

    def _refusal(self, strategy: Strategy) -> str:
        try:
            return strategy.unsupported(self.program, self.device) or ""
        except Exception as error:  # a strategy that cannot answer is no advice
            return f"it fails when it is asked: {first_line(error)}"


def held_by_graphs(pool: Any) -> int:
    """Bytes of private pools that the allocator calls free, although graphs use them at every replay.

    pool:  the program's own, whose memory is counted like any other unless a graph was captured into it
    """
    if torch.cuda.get_allocator_backend() != "native":  # the driver's allocator keeps no list of its segments
        return 0
    plain = {(0, 0)} | ({tuple(pool.id)} if pool is not None and pool.use_count() == 1 else set())
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment.get("segment_pool_id", (0, 0))) not in plain
    )
