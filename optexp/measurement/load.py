"""Power and utilisation of an arm, from a separate pass without timed blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from optexp.measurement.gpu import Reading


@dataclass(frozen=True)
class Load:
    """Power, step time and utilisation of one arm under continuous load.

    power_w:     from the card's energy meter
    step_s:      seconds of a step under this load: a card at its power limit is slower than in blocks with rests
    utilisation: share of time with any kernel, by NVML
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
