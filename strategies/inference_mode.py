"""Inference mode: tensors that can never enter a backward pass carry no version counter and no view tracking."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from optexp.errors import refusing
from optexp.program import Batch, Outputs, Program, Step, preserved
from optexp.strategy import BITWISE, Contract, Counters, Evidence, Notes, Stage, Strategy, UserFile

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace


@dataclass
class InferenceMode(Strategy):
    """torch.inference_mode around the step, which otherwise runs under no_grad."""

    stage = Stage.MEMORY  # after stages that replace the step, and before capture
    level = "application"

    @property
    def contract(self) -> Contract:
        return BITWISE

    @property
    def excludes(self) -> frozenset[str]:
        return frozenset({"optimizer", "model_graph"})  # what learns, and what it would not reach

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """Dispatch takes no host time; None on a CPU, whose traces mix dispatch and work."""
        step = view.parts(ceilings)
        if not step.on_gpu:
            return None
        return step.less("dispatching operators costs the host nothing", waiting=step.breakdown.us("dispatch"))

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if program.trains:
            return "nothing made in inference mode can enter a backward pass: use workload.mode=forward"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        optimized = replace(program, step=inferring(program.step))
        with refusing("the step does not run in inference mode", "leave it out"), preserved(program):
            outputs = optimized.run()
        marked = [name for name, tensor in outputs.items() if tensor.is_inference()]
        return optimized, {"outputs": len(outputs), "marked": len(marked)}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        count = f"{notes['marked']} of {notes['outputs']} outputs are inference tensors"
        if not notes["marked"]:
            return Evidence(False, f"{count}: what is returned is an input, or was not made by the step")
        return Evidence(True, count)

    def recipe(self, notes: Notes) -> str:
        return "step = torch.inference_mode()(step)"

    def patch(self, notes: Notes, file: UserFile) -> str:
        return PATCH.format(forward=file.forward)


PATCH = """\
import functools

@functools.wraps({forward})
def inferring(*args, plain={forward}, **kwargs):
    with torch.inference_mode(not torch.is_grad_enabled()):
        return plain(*args, **kwargs)


{forward} = inferring
"""


def inferring(step: Step) -> Step:
    def inferred(program: Program, batch: Batch) -> Outputs:
        with torch.inference_mode():
            return step(program, batch)

    return inferred
