"""A strategy from outside this repository that errs by 0.05 %: too much for float32, little beside bfloat16."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from optexp.program import Batch, Program
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy


@dataclass
class Inexact(Strategy):
    stage: ClassVar[Stage] = Stage.REWRITE

    def apply(self, program: Program) -> tuple[Program, Notes]:
        exact = program.loss
        assert exact is not None

        def loss(output: Any, batch: Batch) -> Any:
            return 1.0005 * exact(output, batch)

        return replace(program, loss=loss), {}

    def evidence(self, before: object, after: object, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "claims so")
