"""An arm's step time and the ratio of both arms, from a record's measurement, with their uncertainty."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from math import log

from optexp.measurement.contrast import Uncertain, of_processes
from optexp.records.measurement import Measurement


class Arm(IntEnum):
    """Place in a pair of step times."""

    BASELINE = 0
    CANDIDATE = 1


def log_time(measurement: Measurement, arm: Arm, confidence: float) -> Uncertain:
    """ln µs of an arm's step. One process has the uncertainty that processes are expected to have among them."""
    return _of(measurement, [[log(pair[arm]) for pair in pairs] for pairs in measurement.pairs], confidence)


def log_speedup(measurement: Measurement, confidence: float) -> Uncertain:
    """ln of baseline over candidate, pair by pair."""
    ratios = [[log(baseline / candidate) for baseline, candidate in pairs] for pairs in measurement.pairs]
    return _of(measurement, ratios, confidence)


def _of(measurement: Measurement, processes: Sequence[Sequence[float]], confidence: float) -> Uncertain:
    return of_processes(processes, confidence, measurement.spread)
