"""Where the time of a verification goes, by what the arms were asked for."""

from __future__ import annotations

from typing import Any

from optexp.equivalence.protocol import Arm
from optexp.stopwatch import Stopwatch

STEPS = "steps"  # of the arms, and all that surrounds them: copies, poison, repetitions
TRANSFER = "transfer"  # of batches and results, through shared memory
PARTS = {
    "setup": "setup",
    **dict.fromkeys(("draw", "recall", "reference_info", "dead", "constant"), "inputs"),  # and what fp64 makes of them
    **dict.fromkeys(("batch", "expect", "by_host", "fill", "take", "load"), TRANSFER),
    **dict.fromkeys(("yardstick", "judge", "judge_timed"), "gates"),
    **dict.fromkeys(("power", "distribution"), "mutants"),
}


class Watched:
    """An arm whose answers are waited for by the watch."""

    def __init__(self, arm: Arm, watch: Stopwatch) -> None:
        self.arm, self.watch, self.name = arm, watch, arm.name

    def call(self, method: str, **arguments: Any) -> Any:
        with self.watch.phase(PARTS.get(method, STEPS)):
            return self.arm.call(method, **arguments)

    def start(self, method: str, **arguments: Any) -> None:
        self.arm.start(method, **arguments)

    def wait(self) -> Any:
        """Only pieces of a parcel are asked for ahead (see `optexp.equivalence.protocol.convey`)."""
        with self.watch.phase(TRANSFER):
            return self.arm.wait()
