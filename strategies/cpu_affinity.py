"""CPU affinity: a host that runs one thread at a time is faster on one core than moving between cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from optexp.measurement import placement
from optexp.program import Program
from optexp.strategy import BITWISE, Contract, Counters, Evidence, Notes, Stage, Strategy

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace


@dataclass
class CpuAffinity(Strategy):
    """Binds the threads of the optimized program once it is set up; workers of a DataLoader stay on the other cores.

    Measurements bind baseline and candidate to the same cores, for a GPU to a single core. So this strategy needs
    measurement.cpus=all.

    cores:  auto (one core), or core numbers such as [2,3] or '2,3'
    """

    stage = Stage.MEMORY
    level = "system"

    cores: Any = "auto"

    def __post_init__(self) -> None:
        if self.cores == "auto":
            return
        words = self.cores.split(",") if isinstance(self.cores, str) else self.cores
        try:
            self.cores = sorted({int(word) for word in (words if isinstance(words, list) else [words])})
        except (TypeError, ValueError):
            raise ValueError(f"cores={self.cores} is not allowed: write auto, or numbers as in [2,3]") from None

    @property
    def contract(self) -> Contract:
        return BITWISE

    @property
    def changes(self) -> frozenset[str]:
        return frozenset({"torch.get_num_threads"})  # no more than there are cores

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        step = view.parts(ceilings)
        return step.less("the host is never late", waiting=step.waiting_us) if step.on_gpu else None

    def unsupported_on(self, device: torch.device) -> str | None:
        if device.type == "cuda":
            return None
        return "on a CPU, cores are what the work itself runs on: give both arms fewer with measurement.cpus"

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if reason := self.unsupported_on(device):
            return reason
        granted = placement.granted()
        if outside := set(self.chosen(granted)) - set(granted):
            return f"cores {sorted(outside)} are not among those of this run, {granted}: choose others"
        if len(granted) <= len(self.chosen(granted)):
            bound = f"core{'s' if len(granted) > 1 else ''} {', '.join(map(str, granted))}"
            return f"the measurement binds the baseline to {bound} too: use measurement.cpus=all, which leaves it free"
        return None

    def chosen(self, granted: list[int]) -> list[int]:
        return granted[-1:] if self.cores == "auto" else self.cores

    def apply(self, program: Program) -> tuple[Program, Notes]:
        granted = placement.granted()
        cores = self.chosen(granted)
        placement.narrow(cores)
        return program, {"cores": cores, "granted": len(granted)}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        bound, names = counters["process/cores"], ", ".join(map(str, notes["cores"]))
        if bound != len(notes["cores"]):
            return Evidence(False, f"the process was to be bound to cores {names}, and runs on {bound:g} cores")
        return Evidence(True, f"threads bound to core{'s' if bound > 1 else ''} {names} of {notes['granted']}")

    def recipe(self, notes: Notes) -> str:
        cores = notes["cores"]
        return f"import os\n\nos.sched_setaffinity(0, {cores})\ntorch.set_num_threads({len(cores)})"
