"""Lower bounds of a step's time from its own trace: what remains if one kind of waiting were gone."""

from __future__ import annotations

from dataclasses import dataclass

from optexp.profiling.breakdown import Breakdown


@dataclass(frozen=True)
class Bound:
    """A lower bound of a step's time, in µs.

    text: the assumption, in words
    """

    text: str
    us: float


def bounds(breakdown: Breakdown) -> list[Bound]:
    """Bounds of a step on a GPU, the loosest first; empty on a CPU, where work and waiting are not told apart."""
    if breakdown.busy is None:
        return []
    whole, terms = breakdown.wall_us, breakdown.terms
    kernels = breakdown.kernel_share
    found = [
        Bound("the host is never late", whole * (1 - breakdown.host_late)),
        Bound("copies are hidden behind kernels", whole * (1 - terms["exposed_copies"])),
        Bound("the GPU is never idle", whole * breakdown.busy),
        Bound("nothing but the kernels as they are", whole * kernels),
    ]
    return sorted((bound for bound in found if bound.us < 0.995 * whole), key=lambda bound: -bound.us)
