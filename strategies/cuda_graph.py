"""CUDA graphs: a step is captured once and replayed by one launch, without the time of Python and single launches."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from optexp.errors import NotCovered, Uncapturable, Unsupported
from optexp.export import graphed_step
from optexp.program import Batch, Outputs, Program, tensors_of
from optexp.program.feeds import settings
from optexp.schema import choice
from optexp.strategy import Counters, Evidence, Notes, Remedy, Stage, Strategy, UserFile
from optexp.support.optimizer_errors import of_own_optimizer
from optexp.trace import GRAPH_LAUNCH, Trace
from optexp.transforms.capture import CapturedStep, capture, graph_model

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration

FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD)  # optimizers with a fused kernel that can be captured

MORE = 1.25  # kernels over those without a graph, above which the evidence says so
SMALLER = {  # remedies where a capture fails, by scope
    "step": "take it out of the step, leave it outside (strategy.cuda_graph.scope=forward_backward, or model)",
    "forward_backward": "take it out of the step, or leave it outside (strategy.cuda_graph.scope=model)",
    "model": "take it out of the model",
}


@dataclass
class CudaGraph(Strategy):
    """Captures the step. Each replay overwrites the outputs and gradients of the previous one.

    scope:   step: all of `program.step`, optimizer included; forward_backward: any optimizer and gradient scaler stay
             outside; model: only forward and backward of the model, each as a separate graph
    warmup:  steps before the capture, for lazy initialisation, autotuning and compilation
    """

    stage = Stage.CAPTURE
    variants = ({"scope": "forward_backward"}, {"scope": "model"})

    scope: str = choice("step", "forward_backward", "model")
    warmup: int = 3

    def __post_init__(self) -> None:
        if self.warmup < 1:
            raise ValueError(f"warmup={self.warmup} must be at least 1")

    @property
    def provides(self) -> frozenset[str]:
        """A model's graphs are captured outside the step, so settings inside the step do not reach them."""
        return frozenset({"model_graph"} if self.scope == "model" else ())

    @property
    def overwrites(self) -> bool:
        return True

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        return (Remedy("many_small_kernels"), Remedy("dispatch", rank=2), Remedy("gpu_idle", rank=2))

    def helps(self, trace: Trace, calibration: Calibration | None) -> bool:
        """Whether no graph is launched yet."""
        return not any(GRAPH_LAUNCH.match(call.name) for call in trace.api)

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """Launches take no time. Loading takes time still, but may overlap with the device's work."""
        from optexp.profiling.updates import is_fused_when_captured, least_on_host_us, saved_us

        step = view.parts(ceilings)
        if not step.on_gpu or step.breakdown.graph_launches:
            return None
        whole = self.scope == "step"
        saved = saved_us(step) if whole and is_fused_when_captured(step) else 0.0
        host = step.loading_least_us + (0.0 if whole else least_on_host_us(step))
        text = f"the host is never late: kernels and copies take {step.share(step.device_us - saved)}"
        return step.less(text, saved, step.waiting_us, host)

    def unsupported_on(self, device: torch.device) -> str | None:
        if device.type == "cuda":
            return None
        return (
            f"CUDA Graphs need a CUDA device, and this run is on the {device.type.upper()}:"
            " use device=cuda on a machine with an NVIDIA GPU, or try strategy=fusion"
        )

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if reason := self.unsupported_on(device):
            return reason
        batches = [tensors_of(batch).values() for batch in getattr(program.feed, "batches", ())]
        if len({tuple((tensor.shape, tensor.dtype) for tensor in batch) for batch in batches}) > 1:
            return (
                "a graph is recorded for one set of shapes, and here they change from batch to batch:"
                " pad batches to one size, or try strategy=fusion"
            )
        if not settings(program.feed).get("delivers", True):
            return (
                "the step takes its batch from host memory, piece by piece, and waits for the results, which a graph"
                " cannot: leave cuda_graph out, or try streams"
            )
        return self._why_not_the_optimizer(program) if self.scope == "step" else None

    def _why_not_the_optimizer(self, program: Program) -> str | None:
        if program.optimizer is None:
            return None
        name, keys = type(program.optimizer).__name__, program.optimizer.defaults
        outside = "or leave the optimizer outside with strategy.cuda_graph.scope=forward_backward"
        fused = isinstance(program.optimizer, FUSED)
        if program.scaler is not None and not fused:
            needs = f"a captured GradScaler needs a fused optimizer, which {name} has not"
            return f"{needs}: use Adam, AdamW or SGD, {outside}"
        if "capturable" not in keys and not fused:
            return f"{name} keeps its step on the CPU, where a graph cannot follow: use Adam, AdamW or SGD, {outside}"
        if any(p.dtype is torch.float64 for p in program.model.parameters()):
            return f"captured optimizers hold learning rate and step count in float32: use dtype=float32, {outside}"
        return None

    def limit(self, error: Exception) -> str | None:
        if failure := of_own_optimizer(error):
            moved = f"learning rate and step count become tensors on the device, and {failure}"
            return f"{moved}: leave the optimizer outside with strategy.cuda_graph.scope=forward_backward"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        try:
            optimized, inputs = self._captured(program)
        except Uncapturable as reason:
            raise Unsupported(f"{reason}: {SMALLER[self.scope]}, or try strategy=fusion") from reason.__cause__
        return optimized, {
            "grads": [tensor.requires_grad for tensor in inputs],
            "static_input_bytes": sum(tensor.nbytes for tensor in inputs),
            "parameters": len(list(program.model.parameters())),
            "update_outside": isinstance(optimized.step, UpdatedOutside),
        }

    def _captured(self, program: Program) -> tuple[Program, Sequence[Tensor]]:
        without_update = program if program.optimizer is None else outside(program)
        if self.scope == "model":
            model = graph_model(without_update, self.warmup)
            return replace(program, forward=model), model.inputs
        if self.scope == "step" or without_update is program:
            step = capture(program, self.warmup, prepare_optimizer(program))
            return replace(program, step=step), step.inputs
        step = capture(without_update, self.warmup)
        return replace(program, step=UpdatedOutside(step)), step.inputs

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        launches = after.calls("cudaGraphLaunch")
        if not launches:
            return Evidence(False, "no graph was launched in the profiled steps")
        inside = sum(kernel.in_graph for kernel in after.kernels) / len(after.steps)
        outside = len(after.kernels) / len(after.steps) - inside
        count = "1 graph launch" if launches == 1 else f"{launches:g} graph launches"
        text = f"{count} a step, with {inside:g} kernels inside"
        text += f" and {outside:g} outside" if self.scope != "step" else ""
        plain = len(before.kernels) / len(before.steps)
        if inside + outside > MORE * plain:
            text += f" ({plain:g} without a graph: while captured, the model or the optimizer takes another way)"
        return Evidence(True, text)

    def recipe(self, notes: Notes) -> str:
        if self.scope == "model":
            return GRAPHED_MODEL.format(warmup=self.warmup, inputs=len(notes["grads"]), grads=notes["grads"])
        capture = CAPTURE.format(warmup=self.warmup)
        if notes["update_outside"]:
            return OUTSIDE + capture + REPLAY + UPDATE + RETURN + RESTORE
        return PREPARE + capture + REPLAY + RETURN

    def patch(self, notes: Notes, file: UserFile) -> str:
        if self.scope != "step":
            raise NotCovered(f"scope={self.scope} records a part of a step, and a file holds none; use scope=step")
        if not notes["parameters"] or file.forward == file.model:
            raise NotCovered(f"{file.model} has no parameters, by which a recorded model is known again")
        graphed = recording(self.warmup)
        if file.mode == "forward":
            return graphed + GRAPHED_FORWARD.format(forward=file.forward)
        return graphed + GRAPHED_STEP.format(step=file.part("train_step"), optimizer=file.part("optimizer"))


# --- an optimizer inside a graph, or outside ---------------------------------------------------------------------


def prepare_optimizer(program: Program) -> list[Tensor]:
    """Move the optimizer's CPU state to the GPU, in place. Returns the learning rate tensor of each group.

    A graph would freeze Python numbers. Fused kernels are used only if nothing else can be captured: other forms of SGD
    read the rate on the CPU (except compiled ones, and fused forms are never compiled), and a GradScaler reads on the
    CPU whether to skip a step.
    """
    optimizer, device = program.optimizer, program.device
    if optimizer is None:
        return []
    compiled = hasattr(optimizer.step, "_torchdynamo_orig_callable")
    fused = program.scaler is not None or not (compiled or "capturable" in optimizer.defaults)
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


@dataclass
class Later:
    """Replaces an optimizer or a gradient scaler while a step is captured: its `step` does nothing."""

    real: Any

    def step(self, *args: Any, **kwargs: Any) -> None:
        return

    def update(self, *args: Any, **kwargs: Any) -> None:
        return

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)


def outside(program: Program) -> Program:
    """The program without the optimizer's part of its step."""
    scaler: Any = None if program.scaler is None else Later(program.scaler)
    optimizer: Any = Later(program.optimizer)
    return replace(program, optimizer=optimizer, scaler=scaler)


@dataclass
class UpdatedOutside:
    """A captured forward and backward, then the optimizer's step on the captured gradients."""

    captured: CapturedStep

    def __call__(self, program: Program, batch: Batch) -> Outputs:
        assert program.optimizer is not None
        outputs = self.captured(program, batch)
        if program.scaler is None:
            program.optimizer.step()
        else:
            program.scaler.step(program.optimizer)
            program.scaler.update()
        return outputs


# --- in plain PyTorch --------------------------------------------------------------------------------------------

PREPARE = """\
from types import SimpleNamespace

if optimizer is not None:
    prepare_optimizer(SimpleNamespace(optimizer=optimizer, scaler=scaler, device=device))
"""

OUTSIDE = """\
real_optimizer, real_scaler = optimizer, scaler
optimizer, scaler = Later(optimizer), scaler and Later(scaler)  # for as long as the step is captured
"""

CAPTURE = """\
static = tuple(tensor.clone() for tensor in next(batches))  # the graph reads these addresses for ever
side = torch.cuda.Stream()
side.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(side):  # what is made lazily is made here: a training step changes the model all the same
    for _ in range({warmup}):
        step(static)
torch.cuda.current_stream().wait_stream(side)
for parameter in model.parameters():
    parameter.grad = None  # so that backward makes new ones, inside the graph's memory
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):  # a loader may pin memory meanwhile
    result = step(static)
"""

REPLAY = """

def step(batch):
    for buffer, tensor in zip(static, batch, strict=True):
        buffer.copy_(tensor, non_blocking=True)
    graph.replay()  # every p.grad is overwritten in place: do not set them to None
"""

UPDATE = """\
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
"""

RETURN = """\
    return result  # the next replay overwrites it
"""

RESTORE = """

optimizer, scaler = real_optimizer, real_scaler
"""

GRAPHED_MODEL = """\
class Held(nn.Module):  # so that the graph of the backward pass knows the parameters of what is called
    def __init__(self, model, function):
        super().__init__()
        self.model, self.function = model, function

    def forward(self, *inputs):
        with torch.set_grad_enabled(model.training):
            return self.function(inputs)


sample = tuple(tensor.clone().requires_grad_(grad) for tensor, grad in zip(next(batches), {grads}))
graphed = torch.cuda.make_graphed_callables(
    Held(model, predict), sample, num_warmup_iters={warmup}, allow_unused_input=True, pool=pool
)


def predict(batch):
    return graphed(*batch[:{inputs}])
"""


# --- in a user's file --------------------------------------------------------------------------------------------


def recording(warmup: int) -> str:
    """Imports and definitions of `graphed_step`, without the text that explains the module."""
    text = inspect.getsource(graphed_step).split("\n\n", 1)[1]
    return text.replace("    warmup = 3\n", f"    warmup = {warmup}\n") + "\n\n"


GRAPHED_STEP = """\
def {optimizer}(*args, plain={optimizer}, **kwargs):
    optimizer = plain(*args, **kwargs)
    for group in optimizer.param_groups:
        first = group["params"][0]
        if first.is_cuda:  # where a graph reads them
            group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=first.device)
            group.update({{"capturable": True}} if "capturable" in group else {{"foreach": False, "fused": True}})
    return optimizer


{step} = Graphed({step})
"""

GRAPHED_FORWARD = """\
import functools
plain_forward = {forward}
graphed = Graphed(lambda model, given: plain_forward(model, *given[0], **given[1]))


@functools.wraps(plain_forward)
def replayed(self, *args, **kwargs):
    if self.training or torch.is_grad_enabled():
        return plain_forward(self, *args, **kwargs)
    return graphed(self, (args, kwargs))


{forward} = replayed
"""
