"""The worker process: holds one program and answers the runner's messages. `python -m optexp.arm` launches them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from optexp.equivalence.autocast import autocast
from optexp.equivalence.judge import Judge, NoReference
from optexp.equivalence.observation import observe, repeats
from optexp.insight.calibration import calibrate
from optexp.insight.trace import record
from optexp.measurement import clock, placement
from optexp.parcel import Outbox, Parcel, receive
from optexp.program import Batch, Snapshot, map_batch, tensors_of
from optexp.strategy import REASSOCIATES, Contract, Strategy, Unsupported, compose
from optexp.workload import Workload

DISTINCT_BATCHES = 4


@dataclass(frozen=True)
class Spec:
    """What an arm is to hold.

    cores:     what it is bound to once it is set up (none: left free)
    folders:   where its shared memory may lie, the preferred one first
    autocast:  plain autocast to this dtype: the yardstick of a PRECISION contract
    """

    workload: Workload
    strategies: Sequence[Strategy]
    device: str
    dtype: str
    seed: int
    contract: Contract = REASSOCIATES  # what the reference judges by
    cores: tuple[int, ...] = ()
    folders: tuple[str, ...] = ()
    autocast: str | None = None

    def pack(self) -> bytes:
        """By value, so that classes of a notebook or of a script travel."""
        packed: bytes = cloudpickle.dumps(self)
        return packed

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype = getattr(torch, self.dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype


class Arm:
    """One program on one device. Every public method is a message."""

    def __init__(self) -> None:
        self.fresh: list[Batch] = []

    def setup(self, packed: bytes) -> dict[str, Any]:
        """Build the program, fold the stack over it, run it for the first time.

        Returns seconds to the first result, each strategy's notes, and what there is to know about the workload.
        """
        start = clock.now()
        spec: Spec = cloudpickle.loads(packed)
        self._settle(spec)
        program = spec.workload.build(self.device, spec.torch_dtype, spec.seed)
        if spec.autocast is not None:
            program = autocast(program, spec.autocast)
        self.initial = Snapshot(program)
        variety = spec.workload.variety
        count = -(-DISTINCT_BATCHES // variety) * variety
        self.batches = draw(spec.workload, self.device, spec.torch_dtype, spec.seed, count)
        program.feed.reset(self.batches)
        notes = {}
        for strategy in compose(spec.strategies):
            if reason := strategy.unsupported(program, self.device):
                raise Unsupported(f"{strategy.name}: {reason}")
            feed = program.feed
            program, notes[strategy.name] = strategy.apply(program)
            if program.feed is not feed:
                feed.pause()
                program.feed.reset(self.batches)
        self.program = program
        self.restore()
        for _ in range(variety):
            outputs = self.program.run()
        clock.synchronize(self.device)
        setup_s = clock.now() - start
        self.program.feed.pause()
        if spec.cores:
            placement.bind_process(spec.cores)
        if not outputs and not self.program.trains:
            raise NoReference("the model returns no tensor: return one, or several in a tuple, a dict or a dataclass")
        return {"setup_s": setup_s, "notes": notes, **facts(spec.workload, self.initial.values)}

    def _settle(self, spec: Spec) -> None:
        self.device, self.seed, self.outbox = spec.torch_device, spec.seed, Outbox(spec.folders)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        elif spec.cores:  # before anything is compiled for a number of threads
            torch.set_num_threads(min(torch.get_num_threads(), len(spec.cores)))

    def restore(self) -> None:
        """Put everything a step changes back to where it began, in place."""
        self.initial.restore(self.program)
        torch.manual_seed(self.seed)
        self.program.feed.reset(self.batches)

    # --- equivalence

    def load(self, parcel: Parcel) -> None:
        """Batches drawn by the reference arm: valid until it draws again. The feed brings copies of them."""
        self.fresh = receive(parcel)

    def observe(self, step: int, restore: bool, noise: int | None = None) -> Parcel:
        """One step on a fresh batch, and all that can be compared of it."""
        if restore:
            self.restore()
        return self.outbox.send(observe(self.program, self.fresh[step], noise=noise))

    def repeats(self, times: int) -> bool:
        """Whether the program gives the same bits every time."""
        self.restore()
        return repeats(self.program, self.fresh[0], self.initial, times)

    # --- measurement

    def warm_up(self, limit_s: float) -> dict[str, float]:
        """Run until steady. Returns seconds a step, the cost of an empty timing, and batches made in the background."""
        self.restore()
        step_s = clock.warm_up(self.program.run, self.device, limit_s)
        self.program.feed.pause()
        return {"step_s": step_s, "timer_s": clock.empty_timer_s(self.device), "queue": self.program.feed.queue}

    def block(self, steps: int, lead_in: int) -> clock.Timing:
        """Time `steps` steps from the restored state, after `lead_in` unmeasured ones."""
        self.restore()
        for _ in range(lead_in):
            self.program.run()
        timing = clock.time_block(self.program.run, steps, self.device)
        self.program.feed.pause()
        return timing

    def counters(self) -> dict[str, float]:
        """What torch's compiler counted so far (graphs, breaks, recompiles), flattened."""
        utilities = sys.modules.get("torch._dynamo.utils")
        if utilities is None:
            return {}
        return {
            f"{group}/{name}": float(value)
            for group, values in utilities.counters.items()
            for name, value in values.items()
        }

    def peak_memory(self, steps: int) -> dict[str, float]:
        """Peak memory in MiB over steady steps: of the device; on a CPU only what lives between them.

        What a private pool holds counts whole: a CUDA graph's memory is in use at every replay, although the
        allocator calls it free. What is here for the tool's sake, batches but one and the state to restore, does not.
        """
        one, *others = [list(tensors_of(batch).values()) for batch in self.batches]
        if self.device.type != "cuda":
            return {"resident_mib": sum(t.nbytes for t in (*self.program.state().values(), *one)) / 2**20}
        ours = [t for tensors in others for t in tensors] + list(self.initial.values.values())
        overhead = sum(t.nbytes for t in ours if t.device.type == "cuda")
        self.restore()
        clock.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        for _ in range(steps):
            self.program.run()
        clock.synchronize(self.device)
        pools = sum(
            segment["total_size"] - segment["allocated_size"]
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)
        )
        return {
            "peak_mib": (torch.cuda.max_memory_allocated(self.device) + pools - overhead) / 2**20,
            "reserved_mib": torch.cuda.max_memory_reserved(self.device) / 2**20,
            "pools_mib": pools / 2**20,
        }

    # --- profile; leftover tracing slows what follows, so nothing is timed in this process afterwards

    def profile(self, path: str, steps: int) -> dict[str, float]:
        """Write a Chrome trace of steady steps; returns the counters at the end."""
        self.restore()
        for _ in range(max(3, self.program.feed.queue)):
            self.program.run()
        record(self.program.run, steps, Path(path), self.device)
        return self.counters()

    def calibrate(self) -> dict[str, Any]:
        """This device's measured ceilings."""
        return calibrate(self.device).to_dict()


class Reference(Arm):
    """The fp64 arm: draws every batch and judges what the others return. Its goldens never leave it."""

    def setup(self, packed: bytes) -> dict[str, Any]:
        start = clock.now()
        spec: Spec = cloudpickle.loads(packed)
        self._settle(spec)
        self.judgement = Judge(spec.workload, spec.torch_device, spec.torch_dtype, spec.seed, spec.contract)
        return {"setup_s": clock.now() - start, **facts(spec.workload, self.judgement.initial)}

    def draw(self, seed: int, count: int) -> Parcel:
        return self.outbox.send(self.judgement.draw(seed, count))

    def yardstick(self, step: int, parcel: Parcel) -> None:
        self.judgement.yardstick(step, receive(parcel))

    def judge(self, step: int, parcel: Parcel) -> list[Mapping[str, Any]]:
        return [finding.to_dict() for finding in self.judgement.judge(step, receive(parcel))]

    def reference_info(self) -> dict[str, Any]:
        return self.judgement.info()


def draw(workload: Workload, device: torch.device, dtype: torch.dtype, seed: int, count: int) -> list[Batch]:
    """The same batches in every arm that asks with the same seed."""
    generator = torch.Generator(device).manual_seed(seed)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return [map_batch(cast, batch) for batch in workload.batches(generator, count)]


def facts(workload: Workload, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """What only a process that has built the workload knows.

    built:  a checksum of every parameter and buffer: a model that differs from process to process proves nothing
    """
    real = {name: t for name, t in state.items() if name.startswith(("param/", "buffer/")) and t.is_floating_point()}
    built = {name: repr(tensor.sum(dtype=torch.float64).item()) for name, tensor in real.items()}
    return {"samples": workload.samples, "remarks": workload.notes(), "built": built}


if __name__ == "__main__":
    import torch._dynamo  # optimizers and the profiler import it: four seconds, here once instead of in every arm

    from optexp.processes import serve_launcher

    sys.path[:] = [entry or os.getcwd() for entry in sys.path]
    serve_launcher(int(sys.argv[1]))
