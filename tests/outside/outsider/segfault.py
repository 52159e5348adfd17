"""A strategy from outside this repository whose native code crashes."""

import ctypes
from dataclasses import dataclass
from typing import ClassVar

from optexp.program import Program
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy


@dataclass
class Segfault(Strategy):
    stage: ClassVar[Stage] = Stage.REWRITE

    def apply(self, program: Program) -> tuple[Program, Notes]:
        ctypes.string_at(0)
        return program, {}

    def evidence(self, before: object, after: object, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "never asked")
