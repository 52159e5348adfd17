"""Parts of a profiled step that strategies can shorten; strategies make their bounds of them (`Strategy.bound`).

A bound is the step minus the most that a strategy can save, of the device's work and of the time in which the device
waits. Savings are rather overestimated than underestimated: savings on host and device are added up, though one may
hide behind the other, and so are savings of several strategies.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

from optexp.measurement.floor import MARGIN, float32_rate
from optexp.profiling.bounds import Bound
from optexp.profiling.breakdown import ALLOCATE, SLOWED, Breakdown, loader_spans
from optexp.profiling.intervals import Union
from optexp.profiling.work_list import Piece
from optexp.records.profile import Calibration
from optexp.trace import Trace

CACHE_BYTES = 128 * 2**20  # a piece that moves less may work in the L2 cache of any present card
IN_CACHE = 3.0  # bandwidth of that cache over the memory's, at most
LAUNCH = 0.5  # least time of a launch, over torch's empty launch: code that only launches needs less time
TRACED_US = 5.0  # most µs that tracing adds to a call of an operator

_TF32 = re.compile("tf32|s1688")


def in_tf32(piece: Piece) -> bool:
    """Whether a kernel's name says that it computes in TF32; not all names show it."""
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
        """Time with a kernel or a copy running; 0 on a CPU, whose traces mix work and waiting."""
        return (self.breakdown.busy or 0.0) * self.step_us

    @property
    def waiting_us(self) -> float:
        """The rest of the step."""
        return self.step_us - self.device_us

    def share(self, us: float) -> str:
        """A time as a share of the step, in words."""
        return f"{100 * us / self.step_us:.2g} % of the step"

    def less(self, text: str, device: float = 0.0, waiting: float = 0.0, least: float = 0.0) -> Bound | None:
        """The bound that savings leave of the step; None where they leave nothing.

        Args:
            text: The assumption, in words.
            device: µs saved of `device_us`.
            waiting: µs saved of `waiting_us`.
            least: µs that the host needs in any case.
        """
        on_device = max(self.device_us - max(device, 0.0), 0.0)
        us = on_device + max(self.waiting_us - max(waiting, 0.0), least - on_device, 0.0)
        return Bound(text, min(us, self.step_us), on_device, least) if us > 0 else None

    def together(self, bounds: Sequence[Bound]) -> Bound | None:
        """The bound of several strategies together; None where one has no `device_us`, or savings leave nothing.

        The savings of the single strategies are added up, so that a saving common to two of them counts twice.
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
        """Factor by which the breakdown shortened host times, because tracing stretched them."""
        stretched = self.breakdown.stretched or 1.0
        return 1 / stretched if self.on_gpu and stretched > SLOWED else 1.0

    @cached_property
    def loading_us(self) -> float:
        """Time in which the step's own process waits for a DataLoader's batch, or makes it."""
        return self.scale * loader_spans(self.trace).total / len(self.trace.steps)

    @property
    def loading_least_us(self) -> float:
        """`loading_us` minus the most that tracing may have added."""
        spans = loader_spans(self.trace)
        inside = sum(spans.holds(op.start) for op in self.trace.ops) / len(self.trace.steps)
        return max(self.loading_us - TRACED_US * inside, 0.0)

    @property
    def allocating_us(self) -> float:
        """Time in driver calls that allocate or free memory."""
        calls = Union(call.interval for call in self.trace.api if ALLOCATE.match(call.name))
        return calls.total / len(self.trace.steps)

    def launching_us(self, launches: float | None = None) -> float:
        """Least host time of `launches` launches (None: of all in the step); 0 where no launch was calibrated."""
        one_us = self.ceilings.launch_us if self.ceilings is not None else None
        count = (self.breakdown.launches or 0.0) if launches is None else launches
        return LAUNCH * (one_us or 0.0) * count

    # --- the device ----------------------------------------------------------------------------------------------

    def saved_us(self, least: Callable[[Piece], float]) -> float:
        """Device time saved if each piece takes no longer than `least(piece)`, which is µs over all steps."""
        return sum(max(piece.us - least(piece), 0.0) for piece in self.pieces) / len(self.trace.steps)

    def of_work(self, piece: Piece, dtype: str = "", narrower: float = 1.0, split: bool = False) -> float:
        """Least µs of a piece's work at this card's ceilings; 0 where ceilings or work are unknown.

        Args:
            dtype: A dtype in which it may also compute ("tf32" too); empty: its own alone.
            narrower: Size of that dtype's numbers over the size of its own.
            split: Whether a float32 GEMM may be computed as several TF32 GEMMs, which are as exact.
        """
        if self.ceilings is None or not (piece.bytes or piece.flops):
            return 0.0
        rate = max(self.ceilings.matrix.get(name, 0.0) for name in (dtype, piece.dtype, *self._as_tf32(piece)))
        if split and piece.dtype == "float32":
            rate = max(rate, float32_rate(self.ceilings.matrix))
        seconds = piece.flops / rate if rate else 0.0
        return min(piece.us, MARGIN * 1e6 * max(seconds, self.moving_s(piece.bytes * narrower)))

    def moving_s(self, moved: float) -> float:
        """Least seconds in which the device moves this many bytes."""
        if self.ceilings is None:
            return 0.0
        return moved / self.ceilings.bandwidth / (1 if moved >= CACHE_BYTES else IN_CACHE)

    def _as_tf32(self, piece: Piece) -> tuple[str, ...]:
        """("tf32",) for float32 pieces that may run in TF32: convolutions (by default), or by their kernels' names."""
        may = in_tf32(piece) or piece.account == "convolutions"
        return ("tf32",) if piece.dtype == "float32" and may else ()

    @property
    def kernels_us(self) -> float:
        """Time with a kernel running."""
        return Union(kernel.interval for kernel in self.trace.kernels).total / len(self.trace.steps)

    def copied_us(self, *kinds: str) -> float:
        """Time with a copy of these kinds, but no kernel, running."""
        kernels = Union(kernel.interval for kernel in self.trace.kernels)
        copies = Union(copy.interval for copy in self.trace.copies if copy.kind in kinds)
        return ((kernels | copies).total - kernels.total) / len(self.trace.steps)
