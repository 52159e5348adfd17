"""torch.compile: element-wise chains become one kernel that reads and writes memory once."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from optexp.config import one_of
from optexp.program import Batch, Outputs, Program, Step
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy

if TYPE_CHECKING:
    from optexp.insight.trace import Trace

CAPTURING = ("reduce-overhead", "max-autotune")  # both replay what they compile as CUDA Graphs


@dataclass
class Fusion(Strategy):
    """Model and loss through Inductor; compiled when first called.

    With a capturing mode, outputs and gradients of a step are overwritten by the next.
    """

    stage = Stage.COMPILE
    preload = ("torch._dynamo", "torch._inductor.compile_fx")

    mode: str = one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    fullgraph: bool = False
    dynamic: bool | None = None

    @property
    def provides(self) -> frozenset[str]:
        return frozenset({"capture"} if self.mode in CAPTURING else ())

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if device.type == "cpu":
            compiler = os.environ.get("CXX", "g++")
            if shutil.which(compiler) is None:
                return f"torch.compile needs a C++ compiler on a CPU, and {compiler} was not found: install g++"
            if self.mode == "reduce-overhead":
                return "reduce-overhead replays CUDA Graphs, and this is a CPU: use strategy.fusion.mode=default"
        if device.type == "cuda":
            if find_spec("triton") is None:
                return "torch.compile writes Triton kernels for a GPU, and triton is not installed: pip install triton"
            if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
                return "Triton needs a C compiler, and none was found: install gcc"
            if torch.cuda.get_device_capability(device) < (7, 0):
                return f"Triton needs compute capability 7.0, and {torch.cuda.get_device_name(device)} is older"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        captures = self.mode in CAPTURING and program.device.type == "cuda"
        optimized = replace(
            program,
            forward=self.compile(program.call),
            loss=program.loss and self.compile(program.loss),
            step=marked(program.step) if captures else program.step,
        )
        return optimized, {"captures": captures}

    def compile(self, call: Callable[..., Any]) -> Callable[..., Any]:
        compiled: Callable[..., Any] = torch.compile(
            call, mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic
        )
        return compiled

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        count = int(counters.get("stats/unique_graphs", 0))
        graphs = f"{count} graph{'' if count == 1 else 's'}"
        breaks = {name: n for name, n in counters.items() if name.startswith("graph_break/")}
        broken = f", {int(sum(breaks.values()))} graph breaks ({_first_line(min(breaks))})" if breaks else ""
        if not count:
            return Evidence(False, f"torch.compile made no graph{broken}: the step ran eagerly")
        fused = after.compiled_calls()
        replays = after.calls("cudaGraphLaunch")
        if not fused and not replays:
            return Evidence(False, f"{graphs} compiled{broken}, but the profiled step ran none of them")
        if notes["captures"] and not replays:
            return Evidence(False, f"{graphs} compiled{broken}, but none was replayed as a CUDA Graph")
        # Inside a captured step, no call of compiled code is visible.
        ran = f"{replays:g} CUDA Graph launches a step" if replays else f"{fused / len(after.steps):g} calls a step"
        return Evidence(True, f"{graphs} compiled{broken}, {ran}")

    def recipe(self) -> str:
        return f"model = torch.compile(model, mode={self.mode!r}, fullgraph={self.fullgraph}, dynamic={self.dynamic})\n"


def marked(step: Step) -> Step:
    """The step, announced to Inductor's graphs: what the one before returned may now be overwritten."""

    def announced(program: Program, batch: Batch) -> Outputs:
        torch.compiler.cudagraph_mark_step_begin()
        return step(program, batch)

    return announced


def _first_line(counter: str) -> str:
    return counter.removeprefix("graph_break/").strip().splitlines()[0]
