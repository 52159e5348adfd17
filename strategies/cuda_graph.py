"""CUDA Graphs: a whole step is recorded once and launched as one, so that Python and launches no longer cost time."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from optexp.program import Batch, Outputs, Program, clear_gradients, map_batch, preserved, tensors_of
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy, Unsupported

if TYPE_CHECKING:
    from optexp.insight.trace import Trace


@dataclass
class CudaGraph(Strategy):
    """Captures `program.step`, optimizer included. Outputs and gradients of a step are overwritten by the next."""

    stage = Stage.CAPTURE

    warmup: int = 3  # steps before the capture: lazy initialisation, autotuning and compilation happen there

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if device.type != "cuda":
            return (
                f"CUDA Graphs need a CUDA device, and this run is on the {device.type.upper()}:"
                " use device=cuda on a machine with an NVIDIA GPU, or try strategy=fusion"
            )
        batches = [tensors_of(batch).values() for batch in getattr(program.feed, "batches", ())]
        if len({tuple((tensor.shape, tensor.dtype) for tensor in batch) for batch in batches}) > 1:
            return (
                "a graph is recorded for one set of shapes, and here they change from batch to batch:"
                " pad batches to one size, or try strategy=fusion"
            )
        if program.optimizer is None:
            return None
        name = type(program.optimizer).__name__
        keys = program.optimizer.defaults
        if program.scaler is not None and "fused" not in keys:
            return f"a captured GradScaler needs a fused optimizer, which {name} has not: use Adam, AdamW or SGD"
        if "capturable" not in keys and "fused" not in keys:
            return f"{name} keeps its step on the CPU, where a graph cannot follow: use Adam, AdamW or SGD"
        if any(p.dtype is torch.float64 for p in program.model.parameters()):
            return "captured optimizers hold learning rate and step count in float32: use dtype=float32"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        step = capture(program, self.warmup)
        return replace(program, step=step), {"static_input_bytes": sum(tensor.nbytes for tensor in step.inputs)}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        launches = after.calls("cudaGraphLaunch")
        if not launches:
            return Evidence(False, "no graph was launched in the profiled steps")
        kernels = sum(kernel.in_graph for kernel in after.kernels) / len(after.steps)
        return Evidence(True, f"{launches:g} graph launches a step, with {kernels:g} kernels inside")

    def recipe(self) -> str:
        return RECIPE


RECIPE = """\
static = [t.clone() for t in batch]           # the graph reads these addresses for ever
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    for _ in range(3):
        step(*static)                         # zero_grad(set_to_none=True), forward, backward, optimizer
torch.cuda.current_stream().wait_stream(stream)
optimizer.zero_grad(set_to_none=True)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):                 # Adam: capturable=True; SGD or GradScaler: fused=True
    loss = step(*static)
# then, for every batch:
for buffer, tensor in zip(static, batch):
    buffer.copy_(tensor, non_blocking=True)
graph.replay()                                # `loss` and every p.grad now hold this batch's values
"""


@dataclass
class CapturedStep:
    """Replays one step on whatever batch it is given.

    Addresses are fixed at capture: a batch is copied to `inputs`; `outputs` and `gradients` are where they were.
    """

    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    outputs: Outputs
    gradients: Sequence[tuple[Tensor, Tensor]]
    rates: list[Tensor]

    def __call__(self, program: Program, batch: Batch) -> Outputs:
        self._load(list(tensors_of(batch).values()))
        if program.optimizer is not None:
            self._follow_rates(program.optimizer)
        self.graph.replay()
        if self.gradients and self.gradients[0][0].grad is not self.gradients[0][1]:
            for parameter, gradient in self.gradients:  # someone cleared them since
                parameter.grad = gradient
        return dict(self.outputs)

    def _load(self, tensors: list[Tensor]) -> None:
        for captured, tensor in zip(self.inputs, tensors, strict=True):
            if captured.shape != tensor.shape or captured.dtype != tensor.dtype:  # copy_ would broadcast or convert
                raise ValueError(
                    f"captured for {tuple(captured.shape)} {captured.dtype}, got {tuple(tensor.shape)} {tensor.dtype}"
                )
            captured.copy_(tensor, non_blocking=True)  # not foreach: its kernel costs more than a few plain copies

    def _follow_rates(self, optimizer: Optimizer) -> None:
        """A rate that was assigned anew is written where the graph reads it."""
        for group, rate in zip(optimizer.param_groups, self.rates, strict=True):
            if group["lr"] is not rate:
                rate.fill_(group["lr"])
                group["lr"] = rate


def capture(program: Program, warmup: int) -> CapturedStep:
    """Record the program's step on copies of its next batch; the program's state stays what it was."""
    rates = prepare_optimizer(program)
    batch = map_batch(torch.clone, program.feed.next())
    # On a side stream, so that nothing made lazily here belongs to the default one, which cannot be captured.
    current, side = torch.cuda.current_stream(program.device), torch.cuda.Stream(program.device)
    side.wait_stream(current)
    with torch.cuda.stream(side), preserved(program):
        for _ in range(warmup):
            program.step(program, batch)
    current.wait_stream(side)
    clear_gradients(program.model)  # so that backward makes new ones, inside the graph's memory
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, pool=program.pool):
            outputs = program.step(program, batch)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise Unsupported(
            f"the step cannot be captured: {culprit(error)}; a graph cannot hold what waits for the GPU"
            " (.item(), .cpu(), a branch on a tensor): take it out of the step, or try strategy=fusion"
        ) from error
    gradients = [(p, p.grad) for p in program.model.parameters() if p.grad is not None]
    return CapturedStep(graph, list(tensors_of(batch).values()), outputs, gradients, rates)


def prepare_optimizer(program: Program) -> list[Tensor]:
    """Move to the GPU what the optimizer keeps on the CPU, in place. Returns the learning rate of each group.

    Numbers would freeze in the graph. Fused kernels are used only where nothing else can be captured: SGD's other
    forms read the rate on the CPU, and so does a GradScaler that must decide whether to skip.
    """
    optimizer, device = program.optimizer, program.device
    if optimizer is None:
        return []
    fused = program.scaler is not None or "capturable" not in optimizer.defaults
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
        if fused:
            group["fused"], group["foreach"] = True, False
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
    if fused:
        optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]  # what fused=True sets when built
    for state in optimizer.state.values():
        if isinstance(state.get("step"), Tensor):
            state["step"] = state["step"].to(device=device, dtype=torch.float32)
    return [group["lr"] for group in optimizer.param_groups]


def culprit(error: BaseException) -> str:
    """The line of the step at which a capture first failed, and the error's first line."""
    while isinstance(error.__context__, RuntimeError):  # ending the broken capture raises once more
        error = error.__context__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith(str(Path(torch.__file__).parent))]
    frame = own[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line} ({str(error).splitlines()[0]})"
