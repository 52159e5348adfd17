"""What else the machine's processors do, as far as it slows a command down."""

from __future__ import annotations

import os
from dataclasses import dataclass

FELT = 1.5  # times as long: what is less is within what an estimate means


@dataclass(frozen=True)
class MachineLoad:
    """Work that waits for processors.

    queue: mean number of running processes, over the last minute
    cores: of the machine, whoever may use them: the queue is the machine's too
    """

    queue: float
    cores: int

    @classmethod
    def now(cls) -> MachineLoad:
        """At a command's start, when little of the last minute is its own; nothing where the system does not tell."""
        try:
            return cls(os.getloadavg()[0], os.cpu_count() or 1)
        except OSError:
            return cls(0.0, 1)

    @property
    def slowdown(self) -> float:
        """Times as long as on a quiet machine, of work without a budget of time: one process more in the queue."""
        found = (self.queue + 1) / self.cores
        return found if found >= FELT else 1.0

    @property
    def text(self) -> str:
        """Empty where it is not felt."""
        if self.slowdown == 1.0:
            return ""
        return f"the machine is busy: {self.queue:.1f} processes share {self.cores} core{'s' * (self.cores > 1)}"
