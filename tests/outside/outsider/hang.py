"""A strategy from outside this repository that never comes back."""

import time
from dataclasses import dataclass
from typing import ClassVar

from optexp.program import Program
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy


@dataclass
class Hang(Strategy):
    stage: ClassVar[Stage] = Stage.REWRITE

    def apply(self, program: Program) -> tuple[Program, Notes]:
        while True:
            time.sleep(60)

    def evidence(self, before: object, after: object, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "never asked")
