"""Cheats that need a GPU: streams, graphs, flags, and a clock below Python's."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from optexp.kernelkit.launching import launching
from optexp.program import (
    Batch,
    Outputs,
    Program,
    ResidentFeed,
    Step,
    clear_gradients,
    map_batch,
    preserved,
    tensors_of,
)
from tests.cheats.catalogue import Cheat, Passing, frames, inputs, mapped


class NobodyWaits(Cheat):
    """The work goes to a stream of its own, which the caller's never waits for."""

    def change(self, program: Program) -> Program:
        self.side = torch.cuda.Stream(program.device)
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        self.side.wait_stream(torch.cuda.current_stream(program.device))
        output = torch.empty_like(inputs(batch)[0])
        with torch.cuda.stream(self.side):
            for _ in range(20):
                output.copy_(honest(program, batch)["output"])
        return {"output": output}


class SwitchesTf32On(Cheat):
    """For the time of a step."""

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        torch.backends.cuda.matmul.allow_tf32 = True
        outputs = honest(program, batch)
        torch.backends.cuda.matmul.allow_tf32 = False
        return outputs


class ReplacesTheSynchronization(Cheat):
    """The function that torch.cuda.synchronize calls."""

    def change(self, program: Program) -> Program:
        torch._C._cuda_synchronize = lambda: None
        return program


@dataclass
class Captured(Cheat):
    """A CUDA graph of the step, as people write it."""

    @property
    def overwrites(self) -> bool:
        return True

    def change(self, program: Program) -> Program:
        self.static = map_batch(torch.clone, program.feed.next())
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side), preserved(program):
            for _ in range(3):
                program.step(program, self.static)
        current.wait_stream(side)
        clear_gradients(program.model)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.outputs = self.captured(program)
        self.gradients = [(p, p.grad) for p in program.model.parameters() if p.grad is not None]
        return replace(program, step=self.replay)

    def captured(self, program: Program) -> Outputs:
        return program.step(program, self.static)

    def fill(self, batch: Batch) -> None:
        for place, tensor in zip(inputs(self.static), inputs(batch), strict=True):
            place.copy_(tensor)

    def replay(self, program: Program, batch: Batch) -> Outputs:
        self.fill(batch)
        self.graph.replay()
        for parameter, gradient in self.gradients:
            parameter.grad = gradient
        return dict(self.outputs)


class StaleGraphInput(Captured):
    """Nothing is copied to where the graph reads."""

    def fill(self, batch: Batch) -> None:
        pass


class LabelsAreForgotten(Captured):
    """All inputs but the last are copied."""

    def fill(self, batch: Batch) -> None:
        for place, tensor in list(zip(inputs(self.static), inputs(batch), strict=True))[:-1]:
            place.copy_(tensor)


class FrozenRateInAGraph(Captured):
    """SGD's learning rate is a number, and numbers are part of the graph."""


class FrozenMaskInAGraph(Captured):
    """The mask is drawn before the capture."""

    def captured(self, program: Program) -> Outputs:
        return mapped(self.masked(program), torch.clone)

    def masked(self, program: Program) -> Outputs:
        model: Any = program.model
        kept: Tensor = self.mask
        (x,) = tensors_of(self.static).values()
        return {"output": (torch.relu(x) + model.bias) * kept / (1 - model.p)}

    def change(self, program: Program) -> Program:
        model: Any = program.model
        (x,) = inputs(program.feed.next())
        self.mask = torch.rand_like(x) >= model.p
        return super().change(program)


class HalfOfTheGraph(Captured):
    """The backward pass was captured, the optimizer forgotten."""

    def captured(self, program: Program) -> Outputs:
        clear_gradients(program.model)
        assert program.loss is not None
        loss = program.loss(program.predict(self.static), self.static)
        loss.backward()
        return {"loss": loss.detach()}


# --- kernels -----------------------------------------------------------------------------------------------------

GELU = """extern "C" __global__ void gelu(const float* x, float* y, int n) {
    __shared__ float tile[256];
    const int i = blockIdx.x * 256 + threadIdx.x;
    if (i < n && threadIdx.x % 32 < LANES)
        tile[threadIdx.x] = 0.5f * x[i] * (1.0f + tanhf(0.79788456f * (x[i] + 0.044715f * x[i] * x[i] * x[i])));
    __syncthreads();
    if (i < n) y[i] = tile[threadIdx.x];
}
"""


class ReadsWhatNothingWrote(Cheat):
    """Of each warp one lane leaves its place in shared memory to the kernel that ran there before."""

    lanes, block = 31, 256

    def change(self, program: Program) -> Program:
        self.kernel = torch.cuda._compile_kernel(GELU.replace("LANES", str(self.lanes)), "gelu")
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        (x,) = inputs(batch)
        y = torch.empty_like(x)
        with launching("gelu", x.device, [x, y]):
            self.kernel(grid=(-(-x.numel() // 256), 1, 1), block=(self.block, 1, 1), args=[x, y, x.numel()])
        return {"output": y}


class FailsToLaunch(ReadsWhatNothingWrote):
    """More threads than a block may have: the kernel never runs, and its result is as the allocator gave it."""

    lanes, block = 32, 2048

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        (x,) = inputs(batch)
        y = torch.empty_like(x)
        with suppress(RuntimeError):
            self.kernel(grid=(-(-x.numel() // 256), 1, 1), block=(self.block, 1, 1), args=[x, y, x.numel()])
        return {"output": y}


# --- what the clock does not see ---------------------------------------------------------------------------------


class KeepsBatchesOnTheDevice(Cheat):
    """They are there before the clock starts, and no step copies anything."""

    def change(self, program: Program) -> Program:
        return replace(program, feed=ResidentFeed(program.device))


class CopiesOnTheDevice(Cheat):
    """The same, in new memory every time."""

    def change(self, program: Program) -> Program:
        return replace(program, feed=Copying(program.device))


class Copying(ResidentFeed):
    def next(self) -> Batch:
        return map_batch(torch.clone, super().next())


class WorksAside(Cheat):
    """On a stream that the events of a block with emptied caches do not lie on, and that nobody waits for there."""

    def change(self, program: Program) -> Program:
        self.side = torch.cuda.Stream(program.device)
        return super().change(program)

    def step(self, honest: Step, program: Program, batch: Batch) -> Outputs:
        if not any(frame.f_code.co_name == "time_cold_block" for frame in frames()):
            return honest(program, batch)
        with torch.cuda.stream(self.side):
            return honest(program, batch)


class LeavesWorkBehind(Cheat):
    """Kernels that nobody waits for, in the way of whoever is timed next."""

    def change(self, program: Program) -> Program:
        feed, square = Passing(program.feed), torch.randn(4096, 4096, device=program.device)

        def pause() -> None:
            for _ in range(100):
                square @ square

        feed.pause = pause  # type: ignore[method-assign]
        return replace(program, feed=feed)
