"""Fusion: a chain of operations becomes one kernel that reads and writes memory once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from optexp.errors import NotCovered, Unsupported, first_line, refusing
from optexp.export.vendoring import carried
from optexp.kernelkit import toolchain
from optexp.program import Batch, Outputs, Program, Step, preserved, tensors_of, to_device
from optexp.schema import choice
from optexp.strategy import Counters, Evidence, Notes, Remedy, Stage, Strategy, UserFile, grouped
from optexp.support.compiler_errors import of_compiler
from optexp.transforms.torchscript import CALLS_TO_SETTLE, Scripted, fused_groups

if TYPE_CHECKING:
    from optexp.kernelkit.kernel import Kernel
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace

# Back ends that stop after a part of the compiler. A part's gain is the ratio of times to the back end before it.
LADDER = {
    "eager": "run operator by operator, as Python would: against the baseline, the gain of capture alone",
    "aot_eager": "traced to ATen, backward too, and run operator by operator: beside backend=eager, AOTAutograd's part",
    "inductor": "",
}
BETWEEN = "products as they are, one kernel between two of them, and launches that the host needs"
CAPTURING = ("reduce-overhead", "max-autotune")  # both replay what they compile as CUDA Graphs


@dataclass
class Fusion(Strategy):
    """Compiles model and loss; their graphs are captured at the first call.

    backend:  inductor: torch.compile generates the kernels (in a capturing mode, each step overwrites the outputs and
              gradients of the previous one)
              eager, aot_eager: stages before it: run Dynamo's graph, or AOTAutograd's graph of ATen operators
              torchscript: torch's older compiler, for the model only
              kernels, cuda: optexp's kernels in Triton or CUDA C++ replace their patterns; all else runs eagerly
    mode:     mode of inductor
    fullgraph, dynamic:  as in torch.compile: allow no graph break; one graph for all shapes
    """

    stage = Stage.COMPILE
    preload = ("torch._dynamo", "torch._inductor.compile_fx")
    variants = (
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"mode": "max-autotune"},
        {"backend": "kernels"},
        {"backend": "cuda"},
    )

    backend: str = choice("inductor", "aot_eager", "eager", "torchscript", "kernels", "cuda")
    mode: str = choice("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
    fullgraph: bool = False
    dynamic: bool | None = None

    @property
    def provides(self) -> frozenset[str]:
        """Traits of capturing modes. torch.compile's graphs share memory, and must be replayed one after the other."""
        return frozenset({"capture", "graph_trees"} if self.mode in CAPTURING else ())

    @property
    def overwrites(self) -> bool:
        return self.mode in CAPTURING

    @property
    def ours(self) -> bool:
        """Whether optexp's kernels replace patterns."""
        return self.backend in ("kernels", "cuda")

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        return (
            Remedy("dispatch"),
            Remedy("many_small_kernels", rank=2),
            Remedy("many_small_ops"),
            Remedy("memory_bound"),
            Remedy("memory_passes"),
            Remedy("compute_bound", rank=2, options={"mode": "max-autotune"}),
        )

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """All work between two GEMMs or the like becomes one kernel; on a CPU GEMMs, batches and updates remain."""
        from optexp.profiling import fused_work
        from optexp.profiling.updates import least_on_host_us

        step = view.parts(ceilings)
        if self.backend in ("eager", "aot_eager"):
            return step.less("the same kernels, and the host is never late", waiting=step.waiting_us)
        templates = self.ours or self.mode.startswith("max-autotune")
        if not step.on_gpu:
            left = (0.0 if templates else fused_work.on_host(step)) + step.loading_least_us + least_on_host_us(step)
            kept = "batches and updates as they are" if templates else fused_work.KEPT_ON_HOST
            if not templates and any("conv" in op.name for op in step.trace.ops):
                kept += ", convolutions at the peak rate"
            text = f"{kept}, {step.share(left)}, and all else in no time"
            return step.less(text, waiting=step.waiting_us, least=left)
        found = fused_work.on_device(step, templates)
        launching = 0.0 if self.mode in CAPTURING else step.launching_us(found.launches)
        host = step.loading_least_us + max(launching, least_on_host_us(step))
        text = "products at this card's ceilings, which do all else at their ends" if templates else BETWEEN
        return step.less(text, found.saved_us, step.waiting_us, host)

    def limit(self, error: Exception) -> str | None:
        if "does not currently support double backward" in str(error):
            return (
                "torch.compile has no double backward, and this step takes the gradient of a gradient"
                " (create_graph=True): leave fusion out"
            )
        if "non-empty donated buffers" in str(error):
            return (
                "torch.compile gives up what forward saves during the first backward, and this step goes through its"
                " graph again (create_graph=True or retain_graph=True): leave fusion out"
            )
        if "backward through the graph a second time" in str(error):
            return (
                "torch.compile makes one graph of what forward computes, whose backward runs once, and this step goes"
                " through parts of it one by one (autograd.grad inside of forward, or in a hook): leave fusion out"
            )
        if "appears to not have been used in the graph" in str(error):
            return (
                "torch.compile makes one graph of what forward computes, and this step takes the gradient to a tensor"
                " that forward made inside of it (autograd.grad after forward): leave fusion out"
            )
        if "has been modified by an inplace operation" in str(error):
            return (
                "torch.compile keeps a tensor for backward that this step changes in place before backward runs (it may"
                " leave out the program's copy of it), and the program runs without it: leave fusion out"
            )
        if not self.ours and (failure := of_compiler(error)):
            return f"torch's compiler fails on this program, which runs without it ({failure}): leave fusion out"
        return None

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if self.backend != "inductor" and self.mode != "default":
            return f"mode={self.mode} is one of inductor's: leave it out with strategy.fusion.backend={self.backend}"
        if self.backend == "torchscript":
            return torchscript_missing()
        if self.backend in ("eager", "aot_eager"):
            return None  # they generate no code, and need no compiler
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
        notes: Notes = {"captures": captures, "kinds": kinds(program)}
        how: dict[str, Any] = {"mode": self.mode} if self.backend == "inductor" else {"backend": self.backend}
        if self.ours:
            how, known = put_in(self.backend, program.captured)
            notes |= known
        optimized = replace(
            program,
            forward=self.compile(program.call, how),
            loss=program.loss and self.compile(program.loss, how),
            step=marked(program.step) if captures else program.step,
        )
        if self.fullgraph:
            require_whole(optimized)
        return optimized, notes

    def compile(self, call: Callable[..., Any], how: Mapping[str, Any]) -> Callable[..., Any]:
        options: dict[str, Any] = {"fullgraph": self.fullgraph, "dynamic": self.dynamic, **how}
        compiled: Callable[..., Any] = torch.compile(call, **options)
        return compiled

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        if self.backend == "torchscript":
            return scripted_evidence(before, after, notes)
        others = grouped(counters, "claimed")
        count = int(counters.get("stats/unique_graphs", 0) - sum(others.values()))
        graphs = f"{count} graph{'' if count == 1 else 's'}"
        broken, limit = graph_breaks(counters), given_up(counters, notes.get("kinds", 1))
        if not count:
            return Evidence(False, f"torch.compile made no graph{broken}: the step ran eagerly")
        fused = sum(times for region, times in after.compiled_calls().items() if region not in others)
        replays = after.calls("cudaGraphLaunch")
        if not fused and not replays:
            return Evidence(False, f"{graphs} compiled{broken}, but the profiled step ran none of them{limit}")
        if notes["captures"]:
            broken += f", {skips:g} not captured" if (skips := counters.get("inductor/cudagraph_skips", 0)) else ""
            if not replays:
                return Evidence(False, f"{graphs} compiled{broken}, but none was replayed as a CUDA Graph")
        # Inside a captured step, no call of compiled code is visible.
        times, once, often = fused / len(after.steps), "call", "calls"
        if replays:
            times, once, often = replays, "CUDA Graph launch", "CUDA Graph launches"
        ran = f"{times:g} {once if times == 1 else often} a step"
        text = f"{graphs} compiled{broken}, {ran}{limit}"
        if self.ours:
            return replacements(after, notes, counters, text)
        return Evidence(True, f"{text}; {part}" if (part := LADDER[self.backend]) else text)

    def recipe(self, notes: Notes) -> str:
        if self.ours:
            return self.taken_along(list(notes["replaced"]) or notes["patterns"], notes["captured"])
        if self.backend == "torchscript":
            return f"forward = Scripted(model, forward, trains={notes['trains']})\n"
        chosen = f"mode={self.mode!r}" if self.backend == "inductor" else f"backend={self.backend!r}"
        options = f"{chosen}, fullgraph={self.fullgraph}, dynamic={self.dynamic}"
        lines = f"forward = torch.compile(forward, {options})\n"
        lines += f"loss_fn = loss_fn and torch.compile(loss_fn, {options})\n"
        return lines + (MARKED if notes["captures"] else "")

    def patch(self, notes: Notes, file: UserFile) -> str:
        if self.ours or self.backend == "torchscript":
            raise NotCovered(f"backend={self.backend} is code of optexp's, which repro.py carries along")
        if self.mode in CAPTURING:  # on a CPU, too: the file may run on a GPU
            raise NotCovered(f"mode={self.mode} overwrites the results of a call at the next, which the file may keep")
        values = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) != f.default}
        given = "".join(f', {name}="{v}"' if isinstance(v, str) else f", {name}={v}" for name, v in values.items())
        return "\n".join(f"{call} = torch.compile({call}{given})" for call in file.calls)

    def taken_along(self, names: list[str], captured: bool) -> str:
        """The source of the kernels that were used, and of the rewriting that puts them in, for `repro.py`."""
        from optexp.kernelkit.extension import source_files

        cuda = self.backend == "cuda"
        beside = dict.fromkeys(file for name in names for file in source_files(name)) if cuda else ()
        choice = "importlib.import_module('carried.kernelkit.kernel').for_graphs({})" if captured else "{}"
        return carried([*(f"kernels.{name}" for name in names), "transforms.rewriting"], beside) + TAKEN.format(
            names=names,
            choice=choice.format("replace(kernel, function=kernel.cuda)" if cuda else "kernel"),
            options=f"fullgraph={self.fullgraph}, dynamic={self.dynamic}",
        )


TAKEN = """
import importlib
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

kernels = [importlib.import_module(f"carried.kernels.{{name}}").KERNEL for name in {names}]
rewriting = importlib.import_module("carried.transforms.rewriting")
put_in = rewriting.backend(rewriting.Rewriter([{choice} for kernel in kernels]))
forward = torch.compile(forward, backend=put_in, {options})
loss_fn = loss_fn and torch.compile(loss_fn, backend=put_in, {options})
"""


# --- inductor ----------------------------------------------------------------------------------------------------


MARKED = """

def step(batch, plain=step):
    torch.compiler.cudagraph_mark_step_begin()  # what the step before returned may now be overwritten
    return plain(batch)
"""


def marked(step: Step) -> Step:
    """The step, with an announcement to Inductor's graphs that they may overwrite the previous step's results."""

    def announced(program: Program, batch: Batch) -> Outputs:
        torch.compiler.cudagraph_mark_step_begin()
        return step(program, batch)

    return announced


def graph_breaks(counters: Counters) -> str:
    """Number, lines and causes of graph breaks, and of functions that a graph break kept from being compiled."""
    breaks, refused = (sorted(grouped(counters, name)) for name in ("graph_break", "not_compiled"))
    text = f", {len(breaks)} graph break{'s' * (len(breaks) > 1)}: {_listed(breaks)}" if breaks else ""
    if refused:
        text += f", not compiled for a graph break that cannot be resumed: {_listed(refused)}"
    return text


def _listed(lines: Sequence[str], most: int = 3) -> str:
    more = f" and {len(lines) - most} more" if len(lines) > most else ""
    return ", ".join(lines[:most]) + more


def kinds(program: Program) -> int:
    """Number of different batch sizes in the feed; 1 where unknown."""
    batches = getattr(program.feed, "batches", ())
    return len({tuple(tensor.shape for tensor in tensors_of(batch).values()) for batch in batches}) or 1


def given_up(counters: Counters, kinds: int) -> str:
    """A phrase on values that caused recompilation until torch's limit, after which code runs uncompiled."""
    varying = grouped(counters, "given_up")
    if not varying:
        return ""
    limit = int(max(varying.values()))
    text = f"; compiled anew for each {' and each '.join(sorted(varying))}, up to torch's limit of {limit}"
    if all(name.startswith("size of") for name in varying) and kinds > limit:
        return f"{text}: {kinds - limit} of {kinds} sizes of batches run uncompiled (strategy.fusion.dynamic=true)"
    return f"{text} (torch._dynamo.config.recompile_limit): all others run uncompiled"


def require_whole(program: Program) -> None:
    """Compile now, so that a graph break becomes a reason for UNSUPPORTED instead of an error later."""
    from torch._dynamo.exc import Unsupported as Break

    try:
        with preserved(program):
            program.run()
    except Break as error:
        lines = [f"{Path(frame.filename).name}:{frame.lineno}" for frame in error.real_stack[-1:]]
        raise Unsupported(
            f"one graph cannot hold the model and its loss ({' '.join([*lines, first_line(error)])}): take that out, or"
            " allow graph breaks with strategy.fusion.fullgraph=false"
        ) from error


# --- our kernels; modules that need Triton are imported after `unsupported` has checked for it -------------------


def kernels_missing(backend: str, device: torch.device) -> str | None:
    """The reason why our kernels cannot run, with a remedy; None where they can."""
    if backend == "cuda":
        from optexp.kernelkit import extension

        return extension.why_not(device)
    from optexp.kernelkit.kernel import runs_on

    if runs_on(device):
        return None
    return (
        f"our kernels need a CUDA device, and this run is on the {device.type.upper()}: use device=cuda on a machine"
        " with an NVIDIA GPU, or set TRITON_INTERPRET=1 to see them run, slowly, in Python"
    )


def chosen(backend: str) -> list[Kernel]:
    """The kernels of a backend; `function` is the one to put in."""
    from optexp.kernelkit.kernel import kernels

    every = kernels().values()
    return [replace(k, function=k.cuda) for k in every if k.cuda] if backend == "cuda" else list(every)


def put_in(backend: str, captured: bool) -> tuple[dict[str, Any], Notes]:
    """Options of torch.compile for our kernels, and notes: patterns, kernel names in traces, and a count of
    replacements that is filled during compilation.

    captured:  whether a CUDA graph captures the program later
    """
    from optexp.kernelkit.kernel import for_graphs, symbols
    from optexp.transforms import rewriting

    rewriter = rewriting.Rewriter([for_graphs(kernel) if captured else kernel for kernel in chosen(backend)])
    patterns = [kernel.name for kernel in rewriter.kernels]
    notes = {"patterns": patterns, "kernels": sorted(symbols()), "replaced": rewriter.replaced, "captured": captured}
    return {"backend": rewriting.backend(rewriter)}, notes


def replacements(after: Trace, notes: Notes, counters: Counters, graphs: str) -> Evidence:
    """Evidence: the patterns that our kernels replaced, and their launches in the profiled step."""
    replaced, refused = (grouped(counters, name) for name in ("replaced", "refused"))
    if not replaced:
        left = f"; left alone: {'; '.join(sorted(refused)[:5])}" if refused else ""
        known = ", ".join(notes["patterns"])
        return Evidence(False, f"no pattern was replaced in {graphs}; our kernels implement {known}{left}")
    names = ", ".join(f"{int(times)} {name}" for name, times in sorted(replaced.items()))
    if not after.has_gpu:  # elsewhere our kernels do not run
        return Evidence(True, f"replaced: {names}; {graphs}; Triton's interpreter runs them in Python: no time counts")
    launched = sum(k.name in notes["kernels"] or CUDA_KERNEL in k.name for k in after.kernels) / len(after.steps)
    if not launched:
        return Evidence(False, f"{names} put in, but every call went to a library that is faster at these shapes")
    return Evidence(True, f"replaced: {names}, {launched:g} of our kernels a step; {graphs}")


CUDA_KERNEL = "optexp::"  # namespace of our CUDA C++ kernels


# --- TorchScript -------------------------------------------------------------------------------------------------


def torchscript_missing() -> str | None:
    if sys.version_info >= (3, 14):
        return "TorchScript is not supported on Python 3.14: use strategy.fusion.backend=inductor"
    return None


def script(program: Program) -> tuple[Program, Notes]:
    """The program with its model in TorchScript, after the few calls that TorchScript needs to optimize."""
    optimized = replace(program, forward=Scripted(program.model, program.call, program.trains))
    batch = to_device(program.feed.next(), program.device)
    reason = refusing("TorchScript cannot trace this model", "use strategy.fusion.backend=inductor")
    with reason, preserved(program), torch.set_grad_enabled(program.trains):
        for _ in range(CALLS_TO_SETTLE):
            optimized.predict(batch)
    return optimized, {"trains": program.trains, "groups": fused_groups()}


def scripted_evidence(before: Trace, after: Trace, notes: Notes) -> Evidence:
    """Evidence of fused groups: in TorchScript's graph and, on a GPU, as new kernels in the trace."""
    groups = notes["groups"]
    if not groups:
        return Evidence(
            False,
            "TorchScript fused nothing (it fuses element-wise operations, on a GPU): use backend=inductor",
        )
    known = {kernel.name for kernel in before.kernels}
    fused = [k.name for k in after.kernels if k.name.startswith("fused_") and k.name not in known]
    if after.has_gpu and not fused:
        return Evidence(False, f"TorchScript made {groups} fused groups, but the profiled step ran no fused kernel")
    ran = f", {len(fused) / len(after.steps):g} fused kernels a step ({', '.join(sorted(set(fused))[:3])})"
    return Evidence(True, f"TorchScript made {groups} fused groups{ran if fused else ''}; it is deprecated")
