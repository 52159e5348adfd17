"""A compiled optimizer: torch.compile makes few kernels of a whole `optimizer.step()`, whatever the optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import SGD, Optimizer

from optexp import toolchain
from optexp.program import Program
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy

if TYPE_CHECKING:
    from optexp.insight.trace import Trace


@dataclass
class CompiledOptimizer(Strategy):
    """Beside `fusion`, which compiles model and loss; the learning rate becomes a tensor, or each new one would be
    compiled anew."""

    stage = Stage.OPTIMIZER
    preload = ("torch._dynamo", "torch._inductor.compile_fx")

    @property
    def excludes(self) -> frozenset[str]:
        return frozenset({"optimizer"})  # another one that changes how it steps

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        optimizer = program.optimizer
        if optimizer is None:
            return "there is no optimizer to compile: use workload.mode=train"
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
        graphs, operations = (int(counters.get(f"compiled_optimizer/{name}", 0)) for name in ("graphs", "operations"))
        if not graphs:
            return Evidence(False, f"torch.compile made no graph of {notes['optimizer']}.step: it ran eagerly")
        if not after.compiled_calls() and not after.calls("cudaGraphLaunch"):
            return Evidence(False, f"{notes['optimizer']}.step was compiled, but the profiled steps ran it eagerly")
        times = "once" if graphs == 1 else f"{graphs} times"
        return Evidence(True, f"{notes['optimizer']}.step compiled {times}, {operations / graphs:.0f} operations each")

    def recipe(self, notes: Notes) -> str:
        return "onto_device(optimizer, device)\noptimizer.step = torch.compile(optimizer.step)"


def onto_device(optimizer: Optimizer, device: torch.device) -> None:
    """Learning rate and step counts in tensors on the device, where compiled code reads them."""
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(group["lr"], dtype=torch.float32, device=device)
        if "capturable" in group and device.type == "cuda":
            group["capturable"] = True
    for state in optimizer.state.values():
        if isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=device)


def counted(graph: torch.fx.GraphModule, inputs: list[Any]) -> Any:
    """Inductor, which is told from other compiled code by these counters."""
    from torch._dynamo.utils import counters
    from torch._inductor.compile_fx import compile_fx

    ours = counters["compiled_optimizer"]
    ours["graphs"] += 1
    ours["operations"] += sum(node.op.startswith("call") for node in graph.graph.nodes)
    return compile_fx(graph, inputs)
