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

from optexp.equivalence.autocast import autocast
from optexp.equivalence.judge import Judge
from optexp.equivalence.observation import observe, repeats
from optexp.insight.calibration import calibrate
from optexp.insight.trace import record
from optexp.measurement import clock, placement
from optexp.parcel import Outbox, Parcel, receive
from optexp.program import Batch, Snapshot, map_batch, to_device
from optexp.strategy import Contract, Strategy, Unsupported, compose
from optexp.workload import Workload

DISTINCT_BATCHES = 4


@dataclass(frozen=True)
class Spec:
    """What an arm is to hold; `autocast` makes it the yardstick of a PRECISION contract."""

    workload: Workload
    strategies: Sequence[Strategy]
    device: str
    dtype: str
    seed: int
    contract: Contract
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
        self.outbox = Outbox()
        self.fresh: list[Batch] = []

    def setup(self, packed: bytes) -> dict[str, Any]:
        """Build the program, fold the stack over it, run it for the first time.

        Returns seconds to the first result, and each strategy's notes.
        """
        start = clock.now()
        spec: Spec = cloudpickle.loads(packed)
        self.device = spec.torch_device
        self.seed = spec.seed
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        program = spec.workload.build(self.device, spec.torch_dtype, spec.seed)
        if spec.autocast is not None:
            program = autocast(program, spec.autocast)
        self.initial = Snapshot(program)
        self.batches = draw(spec.workload, self.device, spec.torch_dtype, spec.seed, DISTINCT_BATCHES)
        program.feed.reset(self.batches)
        notes = {}
        for strategy in compose(spec.strategies):
            if reason := strategy.unsupported(program, self.device):
                raise Unsupported(f"{strategy.name}: {reason}")
            program, notes[strategy.name] = strategy.apply(program)
        self.program = program
        self.restore()
        self.program.run()
        clock.synchronize(self.device)
        return {"setup_s": clock.now() - start, "notes": notes}

    def restore(self) -> None:
        """Put everything a step changes back to where it began, in place."""
        self.initial.restore(self.program)
        torch.manual_seed(self.seed)
        self.program.feed.reset(self.batches)

    # --- equivalence

    def load(self, parcel: Parcel) -> None:
        """Batches drawn by the reference arm, into new storage."""
        self.fresh = [map_batch(torch.clone, batch) for batch in receive(parcel)]

    def observe(self, step: int, restore: bool, noise: int | None = None) -> Parcel:
        """One step on a fresh batch, and all that can be compared of it."""
        if restore:
            self.restore()
        return self.outbox.send(observe(self.program, to_device(self.fresh[step], self.device), noise=noise))

    def repeats(self, times: int) -> bool:
        """Whether the program gives the same bits every time."""
        self.restore()
        return repeats(self.program, to_device(self.fresh[0], self.device), self.initial, times)

    # --- measurement

    def bind(self, cores: Sequence[int]) -> None:
        placement.bind_process(cores)
        if self.device.type == "cpu":
            torch.set_num_threads(len(cores))

    def warm_up(self, limit_s: float) -> dict[str, float]:
        """Run until steady. Returns seconds a step and the cost of an empty timing."""
        self.restore()
        step_s = clock.warm_up(self.program.run, self.device, limit_s)
        return {"step_s": step_s, "timer_s": clock.empty_timer_s(self.device)}

    def block(self, steps: int, lead_in: int) -> clock.Timing:
        """Time `steps` steps from the restored state, after `lead_in` unmeasured ones."""
        self.restore()
        for _ in range(lead_in):
            self.program.run()
        return clock.time_block(self.program.run, steps, self.device)

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
        """Peak device memory in MiB over steady steps.

        What a private pool holds counts whole: a CUDA graph's memory is in use at every replay, although the
        allocator calls it free.
        """
        if self.device.type != "cuda":
            return {}
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
        free, total = torch.cuda.mem_get_info(self.device)
        return {
            "peak_mib": (torch.cuda.max_memory_allocated(self.device) + pools) / 2**20,
            "reserved_mib": torch.cuda.max_memory_reserved(self.device) / 2**20,
            "pools_mib": pools / 2**20,
            "device_used_mib": (total - free) / 2**20,
        }

    # --- profile; leftover tracing slows what follows, so nothing is timed in this process afterwards

    def profile(self, path: str, steps: int) -> dict[str, float]:
        """Write a Chrome trace of steady steps; returns the counters at the end."""
        self.restore()
        for _ in range(3):
            self.program.run()
        record(self.program.run, steps, Path(path), self.device)
        return self.counters()

    def calibrate(self) -> dict[str, Any]:
        """This device's measured ceilings."""
        return calibrate(self.device).to_dict()

    def describe(self) -> dict[str, Any]:
        """What only a process that uses the device can say about it."""
        facts: dict[str, Any] = {"threads": torch.get_num_threads()}
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            facts |= {
                "gpu": properties.name,
                "compute_capability": f"{properties.major}.{properties.minor}",
                "multiprocessors": properties.multi_processor_count,
                "memory_mib": properties.total_memory // 2**20,
            }
        return facts

    def close(self) -> None:
        """Leave no shared memory behind."""
        self.outbox.close()


class Reference(Arm):
    """The fp64 arm: draws every batch and judges what the others return. Its goldens never leave it."""

    def setup(self, packed: bytes) -> dict[str, Any]:
        start = clock.now()
        spec: Spec = cloudpickle.loads(packed)
        if spec.torch_device.type == "cuda":
            torch.cuda.set_device(spec.torch_device)
        self.judgement = Judge(spec.workload, spec.torch_device, spec.torch_dtype, spec.seed, spec.contract)
        return {"setup_s": clock.now() - start}

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

    return [map_batch(cast, workload.batch(generator)) for _ in range(count)]


if __name__ == "__main__":
    from optexp.processes import serve_launcher

    sys.path[:] = [entry or os.getcwd() for entry in sys.path]
    serve_launcher(int(sys.argv[1]))
