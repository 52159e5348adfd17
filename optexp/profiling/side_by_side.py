"""Least time of a step's work where kernels and copies run concurrently."""

from __future__ import annotations

from dataclasses import replace

from optexp.measurement.floor import MARGIN
from optexp.profiling.intervals import Union
from optexp.profiling.predicting import Parts

UPLOAD = 1.1  # most bandwidth of copies to the host, over the calibrated one of copies from pinned memory


def kernels_together_us(step: Parts, split: bool) -> float:
    """Least µs of a step's kernels if all share the card's bandwidth and arithmetic.

    split: strategies may split the batch, and so every kernel; else the longest kernel stays as long as it is
    """
    longest = 0.0 if split else max((piece.longest for piece in step.pieces), default=0.0)
    moved = sum(step.moving_s(piece.bytes) for piece in step.pieces)
    computed = sum(step.of_work(replace(piece, bytes=0.0)) for piece in step.pieces)
    return max(longest, max(MARGIN * 1e6 * moved, computed) / len(step.trace.steps))


def longest_way_us(step: Parts) -> float:
    """Least µs per step of copies in the slower direction (to device or to host), at the rate of pinned memory."""
    rate = step.ceilings.pinned if step.ceilings is not None else None
    directions_us = []
    for kind in ("HtoD", "DtoH"):
        copies = [copy for copy in step.trace.copies if copy.kind == kind]
        us = Union(copy.interval for copy in copies).total
        at_best_us = sum(copy.bytes for copy in copies) / rate / UPLOAD * 1e6 if rate else 0.0
        directions_us.append(min(us, at_best_us))
    return max(directions_us) / len(step.trace.steps)
