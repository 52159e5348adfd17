"""Fusion: a chain of operations becomes one kernel that reads and writes memory once."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from optexp import toolchain
from optexp.config import one_of
from optexp.program import Batch, Outputs, Program, Step, preserved, to_device
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy, Unsupported
from optexp.torchscript import CALLS_TO_SETTLE, Scripted, fused_groups

if TYPE_CHECKING:
    from optexp.insight.trace import Trace
    from optexp.kernel import Kernel

CAPTURING = ("reduce-overhead", "max-autotune")  # both replay what they compile as CUDA Graphs


@dataclass
class Fusion(Strategy):
    """Model and loss, captured as graphs when first called.

    backend:  inductor: torch.compile writes the kernels (with a capturing mode, outputs and gradients of a step are
              overwritten by the next)
              torchscript: torch's older compiler, for the model alone
              kernels, cuda: ours, in Triton or in CUDA C++, in the place of the patterns they implement; the rest
              runs as it did
    mode:     of inductor
    """

    stage = Stage.COMPILE
    preload = ("torch._dynamo", "torch._inductor.compile_fx")

    backend: str = one_of("inductor", "torchscript", "kernels", "cuda")
    mode: str = one_of("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    fullgraph: bool = False
    dynamic: bool | None = None

    @property
    def provides(self) -> frozenset[str]:
        """Graphs that torch.compile replays share memory, and count on being replayed one after the other."""
        return frozenset({"capture", "graph_trees"} if self.mode in CAPTURING else ())

    @property
    def overwrites(self) -> bool:
        return self.mode in CAPTURING

    @property
    def ours(self) -> bool:
        """Whether our kernels are put in."""
        return self.backend in ("kernels", "cuda")

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if self.backend != "inductor" and self.mode != "default":
            return f"mode={self.mode} is one of inductor's: leave it out with strategy.fusion.backend={self.backend}"
        if self.backend == "torchscript":
            return torchscript_missing()
        if reason := toolchain.missing(device, triton=self.ours):
            return reason
        if self.ours:
            return kernels_missing(self.backend, device)
        if device.type == "cpu" and self.mode == "reduce-overhead":
            return "reduce-overhead replays CUDA Graphs, and this is a CPU: use strategy.fusion.mode=default"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        if self.backend == "torchscript":
            return script(program)
        captures = self.mode in CAPTURING and program.device.type == "cuda"
        optimized = replace(
            program,
            forward=self.compile(program.call),
            loss=program.loss and self.compile(program.loss),
            step=marked(program.step) if captures else program.step,
        )
        return optimized, {"captures": captures, **(implemented(self.backend) if self.ours else {})}

    def compile(self, call: Callable[..., Any]) -> Callable[..., Any]:
        how = {"backend": put_in(self.backend)} if self.ours else {"mode": self.mode}
        options: dict[str, Any] = {"fullgraph": self.fullgraph, "dynamic": self.dynamic, **how}
        compiled: Callable[..., Any] = torch.compile(call, **options)
        return compiled

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        if self.backend == "torchscript":
            return scripted_evidence(before, after, notes)
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
        text = f"{graphs} compiled{broken}, {ran}"
        return replacements(after, notes, counters, text) if self.ours else Evidence(True, text)

    def recipe(self, notes: Notes) -> str:
        if self.ours:
            return ""  # the kernels themselves are what one would have to take along
        if self.backend == "torchscript":
            return f"forward = Scripted(model, forward, trains={notes['trains']})\n"
        options = f"mode={self.mode!r}, fullgraph={self.fullgraph}, dynamic={self.dynamic}"
        lines = f"forward = torch.compile(forward, {options})\n"
        lines += f"loss_fn = loss_fn and torch.compile(loss_fn, {options})\n"
        return lines + (MARKED if notes["captures"] else "")


# --- inductor ----------------------------------------------------------------------------------------------------


MARKED = """

def step(batch, plain=step):
    torch.compiler.cudagraph_mark_step_begin()  # what the step before returned may now be overwritten
    return plain(batch)
"""


def marked(step: Step) -> Step:
    """The step, announced to Inductor's graphs: what the one before returned may now be overwritten."""

    def announced(program: Program, batch: Batch) -> Outputs:
        torch.compiler.cudagraph_mark_step_begin()
        return step(program, batch)

    return announced


def _first_line(counter: str) -> str:
    return counter.removeprefix("graph_break/").strip().splitlines()[0]


# --- our kernels; what needs Triton is imported where it is known to be there ------------------------------------


def kernels_missing(backend: str, device: torch.device) -> str | None:
    """Why they cannot run, and what to do."""
    if backend == "cuda":
        from optexp import extension

        return extension.why_not(device)
    from optexp.kernel import runs_on

    if runs_on(device):
        return None
    return (
        f"our kernels need a CUDA device, and this run is on the {device.type.upper()}: use device=cuda on a machine"
        " with an NVIDIA GPU, or set TRITON_INTERPRET=1 to see them run, slowly, in Python"
    )


def chosen(backend: str) -> list[Kernel]:
    """The kernels of a backend; `function` is the one to put in."""
    from optexp.kernel import kernels

    every = kernels().values()
    return [replace(k, function=k.cuda) for k in every if k.cuda] if backend == "cuda" else list(every)


def put_in(backend: str) -> Callable[..., Any]:
    """For torch.compile."""
    from optexp import rewriting

    return rewriting.backend(rewriting.Rewriter(chosen(backend)))


def implemented(backend: str) -> Notes:
    """What the kernels implement, and the names by which a trace shows them."""
    from optexp.kernel import symbols

    return {"patterns": [kernel.name for kernel in chosen(backend)], "kernels": sorted(symbols())}


def replacements(after: Trace, notes: Notes, counters: Counters, graphs: str) -> Evidence:
    """Which patterns our kernels took the place of, and that the step launched them."""
    replaced, refused = (_group(counters, name) for name in ("replaced", "refused"))
    if not replaced:
        left = f"; left alone: {'; '.join(sorted(refused)[:5])}" if refused else ""
        known = ", ".join(notes["patterns"])
        return Evidence(False, f"no pattern was replaced in {graphs}; our kernels implement {known}{left}")
    names = ", ".join(f"{int(times)} {name}" for name, times in sorted(replaced.items()))
    if not after.has_gpu:
        return Evidence(True, f"replaced: {names}; {graphs}")
    launched = sum(k.name in notes["kernels"] or CUDA_KERNEL in k.name for k in after.kernels) / len(after.steps)
    if not launched:
        return Evidence(False, f"{names} put in, but every call went to a library that is faster at these shapes")
    return Evidence(True, f"replaced: {names}, {launched:g} of our kernels a step; {graphs}")


CUDA_KERNEL = "optexp::"  # the namespace that ours are in


def _group(counters: Counters, group: str) -> dict[str, float]:
    return {name.partition("/")[2]: n for name, n in counters.items() if name.partition("/")[0] == group}


# --- TorchScript -------------------------------------------------------------------------------------------------


def torchscript_missing() -> str | None:
    if sys.version_info >= (3, 14):
        return "TorchScript is not supported on Python 3.14: use strategy.fusion.backend=inductor"
    return None


def script(program: Program) -> tuple[Program, Notes]:
    """The model through TorchScript; it is called a few times here, since it optimizes what it has seen."""
    optimized = replace(program, forward=Scripted(program.model, program.call, program.trains))
    batch = to_device(program.feed.next(), program.device)
    try:
        with preserved(program), torch.set_grad_enabled(program.trains):
            for _ in range(CALLS_TO_SETTLE):
                optimized.predict(batch)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise Unsupported(
            f"TorchScript cannot trace this model ({reason}): use strategy.fusion.backend=inductor"
        ) from error
    return optimized, {"trains": program.trains, "groups": fused_groups()}


def scripted_evidence(before: Trace, after: Trace, notes: Notes) -> Evidence:
    """Groups of operations that became one: in its graph and, on a GPU, as kernels that were not there before."""
    groups = notes["groups"]
    if not groups:
        return Evidence(
            False, "TorchScript fused nothing: it can on a GPU, element-wise operations: use backend=inductor"
        )
    known = {kernel.name for kernel in before.kernels}
    fused = [k.name for k in after.kernels if k.name.startswith("fused_") and k.name not in known]
    if after.has_gpu and not fused:
        return Evidence(False, f"TorchScript made {groups} fused groups, but the profiled step ran no fused kernel")
    ran = f", {len(fused) / len(after.steps):g} fused kernels a step ({', '.join(sorted(set(fused))[:3])})"
    return Evidence(True, f"TorchScript made {groups} fused groups{ran if fused else ''}; it is deprecated")
