"""A compiled optimizer: torch.compile turns a whole `optimizer.step()` into few kernels, for any optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import SGD, Optimizer

from optexp.kernelkit import toolchain
from optexp.program import NotCalled, Program
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy, UserFile, grouped
from optexp.support.compiler_errors import of_compiler
from optexp.support.optimizer_errors import of_own_optimizer

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace

MARK = "Optimizer.step#"  # beginning of the name of an update's range in a trace


@dataclass
class CompiledOptimizer(Strategy):
    """Compiles `optimizer.step`; `fusion` compiles model and loss.

    The learning rate becomes a tensor: a new number would be compiled again.
    """

    stage = Stage.OPTIMIZER
    preload = ("torch._dynamo", "torch._inductor.compile_fx")

    @property
    def excludes(self) -> frozenset[str]:
        return frozenset({"optimizer"})  # another one that changes how it steps

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """The update is one kernel without host time."""
        from optexp.profiling.updates import in_one_kernel

        return in_one_kernel(view.parts(ceilings))

    def limit(self, error: Exception) -> str | None:
        if failure := of_own_optimizer(error):
            return f"learning rate and step count become tensors, and {failure}: leave compiled_optimizer out"
        if failure := of_compiler(error):
            return (
                f"torch's compiler fails on this step, which runs without it ({failure}): leave compiled_optimizer out"
            )
        return None

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        optimizer = program.optimizer
        if optimizer is None:
            return "there is no optimizer to compile: use workload.mode=train"
        if isinstance(program.optimizer, NotCalled):
            return (
                "the step has optimizers of its own, or updates by hand: let get_optimizer(), or the mark's optimizer=,"
                " give the one to compile"
            )
        if not isinstance(optimizer, SGD) and "capturable" not in optimizer.defaults:
            return f"{type(optimizer).__name__} takes no tensor as learning rate: use Adam, AdamW, SGD or RMSprop"
        return toolchain.missing(device)

    def apply(self, program: Program) -> tuple[Program, Notes]:
        assert program.optimizer is not None
        onto_device(program.optimizer, program.device)
        optimizer: Any = program.optimizer
        optimizer.step = torch.compile(optimizer.step, backend=counted)
        return program, {"optimizer": type(program.optimizer).__name__}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        ours, step = grouped(counters, "claimed"), f"{notes['optimizer']}.step"
        if not ours:
            return Evidence(False, f"torch.compile made no graph of {step}: it ran eagerly")
        # In a captured step nothing calls the optimizer; otherwise torch marks each call.
        captured = after.calls("cudaGraphLaunch") and not any(s.name.startswith(MARK) for s in after.annotations)
        if not captured and not ours.keys() & after.compiled_calls().keys():
            return Evidence(False, f"{step} was compiled, but the profiled steps ran it eagerly")
        graphs, operations = sum(ours.values()), counters["compiled_optimizer/operations"]
        times = "once" if graphs == 1 else f"{graphs:g} times"
        return Evidence(True, f"{step} compiled {times}, {operations / graphs:.0f} operations each")

    def recipe(self, notes: Notes) -> str:
        return "onto_device(optimizer, device)\noptimizer.step = torch.compile(optimizer.step)"

    def patch(self, notes: Notes, file: UserFile) -> str:
        return PATCH.format(name=file.part("optimizer"))


PATCH = """\
def {name}(*args, plain={name}, **kwargs):
    optimizer = plain(*args, **kwargs)
    for group in optimizer.param_groups:
        device = group["params"][0].device
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)  # a number would be compiled in
        if "capturable" in group and device.type == "cuda":
            group["capturable"] = True
    optimizer.step = torch.compile(optimizer.step)
    return optimizer
"""


def onto_device(optimizer: Optimizer, device: torch.device) -> None:
    """Move learning rates and step counts to tensors on the device, where compiled code reads them."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if "capturable" in group and device.type == "cuda":
            group["capturable"] = True
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=device)


def counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor as back end; counts its graphs as "claimed", which separates them from other compiled code."""
    from torch._dynamo.utils import counters
    from torch._guards import CompileContext
    from torch._inductor.compile_fx import compile_fx

    counters["claimed"][str(CompileContext.current_compile_id())] += 1
    counters["compiled_optimizer"]["operations"] += sum(node.op.startswith("call") for node in graph.graph.nodes)
    return compile_fx(graph, inputs)
