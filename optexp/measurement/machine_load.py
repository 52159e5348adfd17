"""Load of the machine's processors by other programs, as far as it slows a command down."""

from __future__ import annotations

import os
from dataclasses import dataclass

FELT = 1.5  # slowdown: a smaller one is within the error of a time estimate


@dataclass(frozen=True)
class MachineLoad:
    """Processes that run or wait for processors.

    queue: mean number of running processes, over the last minute
    cores: all cores of the machine, as the queue is the machine's too
    """

    queue: float
    cores: int

    @classmethod
    def now(cls) -> MachineLoad:
        """The load before a command starts to work; 0 where the system does not report it."""
        try:
            return cls(os.getloadavg()[0], os.cpu_count() or 1)
        except OSError:
            return cls(0.0, 1)

    @property
    def slowdown(self) -> float:
        """Expected time of one more process over its time on a quiet machine; 1 below `FELT`."""
        processes_per_core = (self.queue + 1) / self.cores
        return processes_per_core if processes_per_core >= FELT else 1.0

    @property
    def text(self) -> str:
        """A sentence on the load; empty where the slowdown is below `FELT`."""
        if self.slowdown == 1.0:
            return ""
        return f"the machine is busy: {self.queue:.1f} processes share {self.cores} core{'s' * (self.cores > 1)}"
