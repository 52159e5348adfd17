"""Samples made by hand: what a measurement would have seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from optexp.measurement.clock import Timing
from optexp.measurement.gpu import Reading
from optexp.measurement.samples import MAIN, Pair, Sample


def timing(seconds: float, start_s: float = 0.0, device_s: float | None = None) -> Timing:
    return Timing(20, seconds, device_s, start_s)


def made(
    baseline: Callable[[int], float],
    candidate: Callable[[int], float],
    pairs: int = 40,
    processes: int = 5,
    noise: float = 0.002,
    readings: Sequence[Reading] = (),
) -> list[Sample]:
    """Processes whose blocks take what two functions of the pair's number say, give or take."""
    random, samples = Random(0), []
    for process in range(processes):
        blocks = []
        for index in range(pairs):
            start = 10.0 * process + 0.04 * index
            times = [function(index) * random.lognormvariate(0, noise) for function in (baseline, candidate)]
            both = (timing(times[0], start), timing(times[1], start + 0.02))
            blocks.append(Pair(*both, random.random() < 0.5, MAIN, tuple(readings)))
        samples.append(Sample(blocks))
    return samples


def constant(value: float) -> Callable[[int], float]:
    return lambda index: value
