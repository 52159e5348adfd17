"""Steady work of one arm while the parent reads the card: energy and utilisation, in a pass without timing."""

from __future__ import annotations

import time
from collections.abc import Callable
from math import ceil
from statistics import median

from optexp.measurement.gpu import Gpu
from optexp.measurement.load import Load, power
from optexp.workers.arm import Arm
from optexp.workers.client import Client

RAMP_S = 0.1  # until clocks and power have answered to the load
POLL_S = 0.005  # meters move every 20 to 100 ms: when they do matters


def under_load(
    arm: Client[Arm], gpu: Gpu, step_s: float, seconds: float, sleep: Callable[[float], None] = time.sleep
) -> Load:
    """Let `arm` work for about `seconds`, and read the card all the while."""
    working = arm.start(Arm.work, steps=max(2, ceil((RAMP_S + seconds) / step_s)))
    sleep(RAMP_S)
    readings, utilisation, begin = [gpu.read()], list[float](), gpu.read().at_s
    while readings[-1].at_s - begin < 0.9 * seconds:  # while it certainly works
        sleep(POLL_S)
        readings.append(gpu.read())
        utilisation += gpu.utilisation()
    worked_s = working.wait()
    return Load(power(readings), worked_s, median(utilisation) if utilisation else None, readings)
