"""How long the work of a step takes at least where kernels and copies run side by side."""

from __future__ import annotations

from dataclasses import replace

from optexp.measurement.floor import MARGIN
from optexp.profiling.intervals import Union
from optexp.profiling.predicting import Parts

UPLOAD = 1.1  # of the rate at which pinned memory is copied in: what copies out may reach


def kernels_together_us(step: Parts, split: bool) -> float:
    """Of a step: all kernels share the card's bandwidth and arithmetic.

    split: the batch is taken apart, and its kernels with it; else none is shorter than it is
    """
    longest = 0.0 if split else max((piece.longest for piece in step.pieces), default=0.0)
    moved = sum(step.moving_s(piece.bytes) for piece in step.pieces)
    computed = sum(step.of_work(replace(piece, bytes=0.0)) for piece in step.pieces)
    return max(longest, max(MARGIN * 1e6 * moved, computed) / len(step.trace.steps))


def longest_way_us(step: Parts) -> float:
    """Of a step: the copies in, or those out, at the rate of pinned memory."""
    rate = step.ceilings.pinned if step.ceilings is not None else None
    ways = []
    for kind in ("HtoD", "DtoH"):
        copies = [copy for copy in step.trace.copies if copy.kind == kind]
        us = Union(copy.interval for copy in copies).total
        at_best = sum(copy.bytes for copy in copies) / rate / UPLOAD * 1e6 if rate else 0.0
        ways.append(min(us, at_best))
    return max(ways) / len(step.trace.steps)
