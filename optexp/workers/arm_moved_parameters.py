"""ARM: whether steps take longer once parameters have changed, as of a program that keeps what it computes of them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from math import fsum

import torch

from optexp.measurement import clock
from optexp.support.wrapped import parts
from optexp.workers.arm_timing import Timing, turns

NEARLY = 1 + 2.0**-10  # times a parameter


class MovedParameters(Timing):
    """Single steps right after parameters have changed in place, beside others."""

    def moved_parameters(self) -> tuple[float, float]:
        """How many times longer a step takes after its parameters have changed than with the same ones, and the ratio
        of two timings of the latter: the scatter of a busy machine.

        Steps that change no parameter are for a caller who does. Each step is waited for; of each batch the shortest
        one counts, however busy the machine is.
        """
        seconds: tuple[list[list[float]], ...] = ([], [], [])
        for _ in turns():
            self.restore()
            run = self.runner()
            run()
            for moves, found in zip((True, False, False), seconds, strict=True):
                found.append([self._step_s(run, moves) for _ in self.batches])
        self.restore()
        self.program.feed.pause()
        moved, *same = (fsum(min(steps) for steps in zip(*found, strict=True)) for found in seconds)
        return moved / max(same), max(same) / min(same)

    def _step_s(self, run: Callable[[], object], moves: bool) -> float:
        if moves:
            with torch.no_grad():
                for part in chain.from_iterable(parts(p).values() for p in self.program.model.parameters()):
                    if part.is_floating_point() or part.is_complex():
                        part.mul_(NEARLY)
        return clock.time_block(run, 1, self.device).wall_s
