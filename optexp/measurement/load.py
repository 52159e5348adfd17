"""What an arm draws and how busy it keeps the card: a pass of its own, in which nothing is timed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from optexp.measurement.gpu import Reading


@dataclass(frozen=True)
class Load:
    """What one said of itself, and what the card said.

    power_w:     from its energy meter
    step_s:      what a step took meanwhile: at its power limit a card is slower than in blocks between which it rests
    utilisation: its busy share by NVML (time with any kernel)
    """

    power_w: float | None
    step_s: float
    utilisation: float | None
    readings: Sequence[Reading]


def power(readings: Sequence[Reading]) -> float | None:
    """Mean watts between the first and the last move of the energy meter; None where it moved less than three times."""
    known = [(r.at_s, r.energy_j) for r in readings if r.energy_j is not None]
    moves = [after for before, after in pairwise(known) if after[1] > before[1]]
    if len(moves) < 3:
        return None
    (begin, first), (end, last) = moves[0], moves[-1]
    return (last - first) / (end - begin)
