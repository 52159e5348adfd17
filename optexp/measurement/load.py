"""What an arm draws and how busy it keeps the card: a pass of its own, in which nothing is timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil
from statistics import median
from typing import Any, Protocol

from optexp.measurement.gpu import Gpu, Reading

RAMP_S = 0.1  # until clocks and power have answered to the load
POLL_S = 0.005  # meters move every 20 to 100 ms: when they do matters


class Starter(Protocol):
    """An arm that works while somebody else looks."""

    def start(self, method: str, **arguments: Any) -> None: ...
    def wait(self) -> Any: ...


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


def under_load(
    arm: Starter, gpu: Gpu, step_s: float, seconds: float, sleep: Callable[[float], None] = time.sleep
) -> Load:
    """Let `arm` work for about `seconds`, and read the card all the while."""
    arm.start("work", steps=max(2, ceil((RAMP_S + seconds) / step_s)))
    sleep(RAMP_S)
    readings, utilisation, begin = [gpu.read()], list[float](), gpu.read().at_s
    while readings[-1].at_s - begin < 0.9 * seconds:  # while it certainly works
        sleep(POLL_S)
        readings.append(gpu.read())
        utilisation += gpu.utilisation()
    worked_s = arm.wait()
    return Load(power(readings), worked_s, median(utilisation) if utilisation else None, readings)


def power(readings: Sequence[Reading]) -> float | None:
    """Mean watts between the first and the last move of the energy meter; None where it moved less than three times."""
    known = [(r.at_s, r.energy_j) for r in readings if r.energy_j is not None]
    moves = [after for before, after in pairwise(known) if after[1] > before[1]]
    if len(moves) < 3:
        return None
    (begin, first), (end, last) = moves[0], moves[-1]
    return (last - first) / (end - begin)
