"""Fused optimizers: one kernel updates all parameters, instead of several small kernels for each parameter."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from optexp.errors import refusing
from optexp.program import NotCalled, Program, clear_gradients, preserved
from optexp.schema import choice
from optexp.strategy import Counters, Evidence, Notes, Remedy, Stage, Strategy, UserFile
from optexp.support.eagerly import EagerMode, is_view, name_of

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace

# Names of an implementation's operations and kernels in a trace; a captured step shows kernels only.
SIGNS = {
    "fused": re.compile(r"aten::_fused_(adam|adamw|sgd|adagrad)_$|Fused\w+MathFunctor"),
    "foreach": re.compile(r"aten::_foreach_|multi_tensor_apply_kernel<(?!.*Fused\w+MathFunctor)"),
}


@dataclass
class FusedOptimizer(Strategy):
    """The same optimizer with the same hyperparameters and state, in torch's fused or foreach implementation."""

    stage = Stage.OPTIMIZER
    variants = ({"implementation": "foreach"},)

    implementation: str = choice("fused", "foreach")

    @property
    def excludes(self) -> frozenset[str]:
        return frozenset({"optimizer"})  # another one that changes how it steps

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        return (Remedy("many_small_kernels", rank=3),)

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """The update is one kernel without host time."""
        from optexp.profiling.updates import in_one_kernel

        return in_one_kernel(view.parts(ceilings))

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if program.optimizer is None:
            return "there is no optimizer to speed up: use workload.mode=train"
        if isinstance(program.optimizer, NotCalled):
            return (
                "the step has optimizers of its own, or updates by hand: let get_optimizer(), or the mark's optimizer=,"
                " give the one to speed up"
            )
        if self.implementation not in program.optimizer.defaults:
            others = "Adam, AdamW or SGD" if self.implementation == "fused" else "Adam, AdamW, SGD, RMSprop, ..."
            return f"torch has no {self.implementation} {type(program.optimizer).__name__}: use {others}"
        if any(getattr(module, "sparse", False) is True for module in program.model.modules()):
            return "the model has sparse gradients (sparse=True), and neither implementation takes them: leave that out"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        assert program.optimizer is not None
        before = operations(program)
        implement(program.optimizer, self.implementation)
        with refusing("torch has none for this device or dtype", "leave fused_optimizer out"):
            after = operations(program)
        return program, {"before": before, "after": after, "optimizer": type(program.optimizer).__name__}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        sign = SIGNS[self.implementation]
        ours = {name: count for name, count in notes["after"].items() if sign.search(name)}
        if not ours:
            return Evidence(False, f"{notes['optimizer']}.step ran no {self.implementation} operation")
        if any(sign.search(name) for name in notes["before"]):
            other = "; try strategy.fused_optimizer.implementation=fused" if self.implementation == "foreach" else ""
            return Evidence(False, f"{notes['optimizer']}.step is {self.implementation} without being told{other}")
        if not any(sign.search(span.name) for span in (*after.ops, *after.kernels)):
            return Evidence(False, f"no {self.implementation} operation or kernel ran in the profiled steps")
        counts = [sum(found.values()) for found in (notes["before"], notes["after"])]
        names = ", ".join(sorted(name.removeprefix("aten::") for name in ours))
        return Evidence(True, f"{notes['optimizer']}.step: {counts[0]} operations became {counts[1]} ({names})")

    def recipe(self, notes: Notes) -> str:
        return f'implement(optimizer, "{self.implementation}")'

    def patch(self, notes: Notes, file: UserFile) -> str:
        name, fused = file.part("optimizer"), self.implementation == "fused"
        return PATCH.format(name=name, options="foreach=False, fused=True" if fused else "foreach=True")


PATCH = """\
def {name}(*args, plain={name}, **kwargs):
    optimizer = plain(*args, **kwargs)
    for options in (optimizer.defaults, *optimizer.param_groups):
        options.update({options})
    return optimizer
"""


def implement(optimizer: Optimizer, implementation: str) -> None:
    """Change an existing optimizer to `fused=True` or `foreach=True`; its state is kept."""
    fused = implementation == "fused"
    for group in optimizer.param_groups:
        group.update({"foreach": not fused} | ({"fused": fused} if "fused" in group else {}))
    optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]  # a GradScaler then leaves it to the kernel
    for parameter, state in optimizer.state.items():
        if fused and isinstance(state.get("step"), torch.Tensor):
            state["step"] = state["step"].to(device=parameter.device, dtype=torch.float32)


def operations(program: Program) -> dict[str, int]:
    """Number of operations in one step of the optimizer, by name; the program's state is restored."""
    assert program.optimizer is not None
    with preserved(program):
        for parameter in program.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        with Operations() as seen:
            program.optimizer.step()
    clear_gradients(program.model)
    return dict(seen.counts)


class Operations(EagerMode):
    """Counts the operations of an optimizer's step, without views."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def operation(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        self.counts[f"aten::{name_of(func)}"] += not is_view(func)
        return func(*args, **kwargs)
