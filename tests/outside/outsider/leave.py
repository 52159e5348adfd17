"""A strategy from outside this repository that ends its process."""

import os
from dataclasses import dataclass
from typing import ClassVar

from optexp.program import Program
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy


@dataclass
class Leave(Strategy):
    stage: ClassVar[Stage] = Stage.REWRITE
    status: int = 7

    def apply(self, program: Program) -> tuple[Program, Notes]:
        os._exit(self.status)

    def evidence(self, before: object, after: object, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "never asked")
