"""ARM: traces with ranges around phases, and with Python frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from optexp.measurement import clock
from optexp.measurement.recorder import record_stacks
from optexp.program import Outputs
from optexp.support.ranges import nvtx, phase
from optexp.workers.arm_program import Holder
from optexp.workers.phase_marks import phases

CLEARLY = 10  # times a limit: no disturbance makes a single step so much longer
MARKED_S = 200e-6  # of a step: in a shorter one, ranges around its phases would be much of what is seen


class Ranges(Holder):
    """Steps with ranges around their parts."""

    @contextmanager
    def in_phases(self, shortest_s: float = MARKED_S) -> Iterator[Callable[[], Outputs]]:
        """Yields a step with ranges around its phases, or the plain one where that is shorter than `shortest_s`; on a
        GPU ranges are NVTX ranges too."""
        run, source = self.runner(), self.offered
        assert source is not None, "setup comes first"
        with nvtx(self.device.type == "cuda"):
            if shortest_s and self._shorter(run, shortest_s):
                yield run
                return
            with phases(self.program) as program:
                step, take = program.step, program.feed.next

                def run_in_phases() -> Outputs:
                    source.due += 1
                    with phase("feed"):
                        batch = take()
                    return step(program, batch)

                yield run_in_phases

    def _shorter(self, run: Callable[[], Outputs], limit_s: float) -> bool:
        """Whether a step is shorter; steps that clearly are not run once."""
        first = clock.time_block(run, 1, self.device).wall_s
        return first < CLEARLY * limit_s and clock.time_block(run, 5, self.device).wall_s < limit_s

    def profile_stacks(self, path: str, steps: int) -> None:
        """Write a Chrome trace with Python frames."""
        self.restore()
        run = self.runner()
        run()
        record_stacks(run, steps, Path(path), self.device)
