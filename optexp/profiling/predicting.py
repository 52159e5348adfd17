"""What strategies can shorten of a profiled step: from these parts they make their bounds (`Strategy.bound`).

A bound is the step less all that a strategy can save: of the device's work, and of the time in which the device waits.
Savings are taken too large rather than too small. Each counts in full, though what is saved on one side (host or
device) may only lay bare the other; so do savings of several strategies together.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from optexp.measurement.floor import MARGIN
from optexp.profiling.bounds import Bound
from optexp.profiling.breakdown import ALLOCATE, SLOWED, Breakdown, loader_spans
from optexp.profiling.intervals import Union
from optexp.profiling.work_list import Piece
from optexp.records.profile import Calibration
from optexp.trace import Trace

CACHE_BYTES = 128 * 2**20  # what moves less may do so in the cache of any card of today,
IN_CACHE = 3.0  # so many times as fast as in memory
LAUNCH = 0.5  # of the time that torch needs for an empty launch: code that launches one after the other needs less
TRACED_US = 5.0  # by which tracing stretches a call of an operator, at most

_TF32 = re.compile("tf32|s1688")


def in_tf32(piece: Piece) -> bool:
    """Whether its kernels' names say so; not all of them tell."""
    return any(_TF32.search(name) for name in piece.kernels)


@dataclass(frozen=True)
class Parts:
    """A profiled step. Times are µs of a step.

    pieces: kernels by operator, over all steps
    """

    trace: Trace
    breakdown: Breakdown
    pieces: Sequence[Piece]
    ceilings: Calibration | None

    @property
    def on_gpu(self) -> bool:
        return self.breakdown.busy is not None

    @property
    def step_us(self) -> float:
        return self.breakdown.wall_us

    @property
    def device_us(self) -> float:
        """With a kernel or a copy running; 0 on a CPU, where work and waiting are not told apart."""
        return (self.breakdown.busy or 0.0) * self.step_us

    @property
    def waiting_us(self) -> float:
        """All else."""
        return self.step_us - self.device_us

    def share(self, us: float) -> str:
        """Of the step, in words."""
        return f"{100 * us / self.step_us:.2g} % of the step"

    def less(self, text: str, device: float = 0.0, waiting: float = 0.0, least: float = 0.0) -> Bound | None:
        """The step without what is saved; None where that would leave nothing.

        Args:
            device: µs saved of the device's work.
            waiting: µs saved of the rest.
            least: µs that the host needs in any case.
        """
        on_device = max(self.device_us - max(device, 0.0), 0.0)
        us = on_device + max(self.waiting_us - max(waiting, 0.0), least - on_device, 0.0)
        return Bound(text, min(us, self.step_us), on_device, least) if us > 0 else None

    def together(self, bounds: Sequence[Bound]) -> Bound | None:
        """Of several strategies at once; None where one does not tell its parts, or nothing would be left.

        No more is saved than each saves alone: what two of them save of the same work is counted twice.
        """
        known = [(bound.us - bound.device_us, bound.device_us) for bound in bounds if bound.device_us is not None]
        if len(known) < len(bounds):
            return None
        device = sum(self.device_us - on_device for _, on_device in known)
        waiting = sum(max(self.waiting_us - rest, 0.0) for rest, _ in known)
        return self.less("; ".join(bound.text for bound in bounds), device, waiting)

    # --- the host ------------------------------------------------------------------------------------------------

    @property
    def scale(self) -> float:
        """By what the breakdown has shortened a host's times, because tracing stretched them."""
        stretched = self.breakdown.stretched or 1.0
        return 1 / stretched if self.on_gpu and stretched > SLOWED else 1.0

    @cached_property
    def loading_us(self) -> float:
        """In which the step's own process asks a DataLoader for its batch, or makes it."""
        return self.scale * loader_spans(self.trace).total / len(self.trace.steps)

    @property
    def loading_least_us(self) -> float:
        """The same without what tracing may have added to it."""
        spans = loader_spans(self.trace)
        inside = sum(spans.holds(op.start) for op in self.trace.ops) / len(self.trace.steps)
        return max(self.loading_us - TRACED_US * inside, 0.0)

    @property
    def allocating_us(self) -> float:
        """In calls that ask the driver for memory, or give it back."""
        calls = Union(call.interval for call in self.trace.api if ALLOCATE.match(call.name))
        return calls.total / len(self.trace.steps)

    def launching_us(self, launches: float | None = None) -> float:
        """Of the host, for so many launches, or for all that the step has; 0 where it was not measured."""
        each = self.ceilings.launch_us if self.ceilings is not None else None
        count = (self.breakdown.launches or 0.0) if launches is None else launches
        return LAUNCH * (each or 0.0) * count

    # --- the device ----------------------------------------------------------------------------------------------

    def saved_us(self, least: Callable[[Piece], float]) -> float:
        """Of the device's work, if each piece takes no more than `least` says, in µs over all steps."""
        return sum(max(piece.us - least(piece), 0.0) for piece in self.pieces) / len(self.trace.steps)

    def of_work(self, piece: Piece, dtype: str = "", narrower: float = 1.0) -> float:
        """µs that a piece's work needs at least at this card's ceilings; 0 where they or the work are not known.

        Args:
            dtype: In which it may compute ("tf32" too); its own where empty.
            narrower: Size of that dtype's numbers over its own.
        """
        if self.ceilings is None or not (piece.bytes or piece.flops):
            return 0.0
        rate = max(self.ceilings.matrix.get(name, 0.0) for name in (dtype, piece.dtype, *self._as_tf32(piece)))
        seconds = piece.flops / rate if rate else 0.0
        return min(piece.us, MARGIN * 1e6 * max(seconds, self.moving_s(piece.bytes * narrower)))

    def moving_s(self, moved: float) -> float:
        """Seconds that so many bytes need at least."""
        if self.ceilings is None:
            return 0.0
        return moved / self.ceilings.bandwidth / (1 if moved >= CACHE_BYTES else IN_CACHE)

    def _as_tf32(self, piece: Piece) -> tuple[str, ...]:
        """Convolutions compute in TF32 unless they are forbidden to, and so do some products."""
        may = in_tf32(piece) or piece.account == "convolutions"
        return ("tf32",) if piece.dtype == "float32" and may else ()

    @property
    def kernels_us(self) -> float:
        """With a kernel running."""
        return Union(kernel.interval for kernel in self.trace.kernels).total / len(self.trace.steps)

    def copied_us(self, *kinds: str) -> float:
        """Copies of these kinds while no kernel runs."""
        kernels = Union(kernel.interval for kernel in self.trace.kernels)
        copies = Union(copy.interval for copy in self.trace.copies if copy.kind in kinds)
        return ((kernels | copies).total - kernels.total) / len(self.trace.steps)
