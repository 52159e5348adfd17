"""A strategy from outside this repository that is right on the first shape it meets, and on no other."""

from dataclasses import dataclass, replace
from typing import ClassVar

from optexp.program import Batch, Outputs, Program, tensors_of
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy


@dataclass
class WrongSometimes(Strategy):
    """As a kernel is whose last tile was forgotten."""

    stage: ClassVar[Stage] = Stage.CAPTURE

    def apply(self, program: Program) -> tuple[Program, Notes]:
        expected = [tensor.shape for tensor in tensors_of(program.feed.next()).values()]

        def step(running: Program, batch: Batch) -> Outputs:
            outputs = program.step(running, batch)
            known = [tensor.shape for tensor in tensors_of(batch).values()] == expected
            return outputs if known else {name: tensor * 1.5 for name, tensor in outputs.items()}

        return replace(program, step=step), {}

    def evidence(self, before: object, after: object, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "claims so")
