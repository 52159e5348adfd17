"""Change points: indices at which a series of step times moved to another level.

Two stages. `ruptures` splits the series (KernelCPD with a Gaussian kernel, whose influence is bounded: outliers are far
from everything alike). Then a split counts only if the medians just before and just after it differ by more than noise
and by more than MIN_CHANGE, so slow drift is no step.
https://doi.org/10.1016/j.sigpro.2019.107299 (Truong, Oudre, Vayatis 2020). experiments/results/change_points.md
measures how often these constants find a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from math import exp, log, pi, sqrt
from statistics import median

from optexp.errors import ConfigError

GAMMA = 0.1  # of the kernel exp(−γ·d²), d in standard deviations of the noise
PENALTY = 4.0  # cost of a split, in points of the series; a point unlike all others costs 1
MIN_POINTS = 4  # of a level
WINDOW = 10  # points on each side whose medians are compared
DEVIATIONS = 4.0  # standard deviations of the difference of the medians, beyond which it is no noise
MIN_CHANGE = 0.01  # of a level; smaller steps are not reported
NORMAL_MAD = 0.6745  # median absolute deviation of a normal variable, in standard deviations
SMALLEST_NOISE = 1e-6  # of a series whose values repeat


@dataclass(frozen=True)
class Step:
    """A change of level. `index`: first point after it; `before`, `after`: medians next to it, in the series' unit."""

    index: int
    before: float
    after: float

    @property
    def change(self) -> float:
        """0.05: the level rose by 5 %."""
        return self.after / self.before - 1


def steps(values: Sequence[float]) -> list[Step]:
    """Steps of a series of positive values, in their order.

    Raises:
        ConfigError: ruptures is not installed.
    """
    if len(values) < 2 * MIN_POINTS:
        return []
    logs = [log(value) for value in values]
    sigma = noise(logs)
    bounds = [0, *_splits([value / sigma for value in logs]), len(logs)]
    while len(bounds) > 2:
        strengths = [_strength(logs, bounds[n - 1], bounds[n], bounds[n + 1], sigma) for n in range(1, len(bounds) - 1)]
        weakest = min(range(len(strengths)), key=strengths.__getitem__)
        if strengths[weakest] > 1:
            break
        del bounds[weakest + 1]  # neighbouring splits then have a longer level beside them
    return [_step(logs, *bounds[n - 1 : n + 2]) for n in range(1, len(bounds) - 1)]


def noise(logs: Sequence[float]) -> float:
    """Standard deviation of the noise, from differences of neighbours: steps, drift and outliers hardly change it."""
    differences = [abs(after - before) for before, after in pairwise(logs)]
    return max(median(differences) / NORMAL_MAD / sqrt(2), SMALLEST_NOISE)


def require() -> None:
    """Raises ConfigError where ruptures is not installed."""
    if find_spec("ruptures") is None:
        raise ConfigError("change points need the extra [watch]: pip install 'optexp[watch]'")


def _splits(scaled: Sequence[float]) -> list[int]:
    require()
    import numpy as np
    import ruptures

    search = ruptures.KernelCPD("rbf", params={"gamma": GAMMA}, min_size=MIN_POINTS)
    return [int(index) for index in search.fit(np.array(scaled)[:, None]).predict(pen=PENALTY)[:-1]]


def _beside(logs: Sequence[float], begin: int, index: int, end: int) -> tuple[Sequence[float], Sequence[float]]:
    return logs[max(begin, index - WINDOW) : index], logs[index : min(end, index + WINDOW)]


def _strength(logs: Sequence[float], begin: int, index: int, end: int, sigma: float) -> float:
    """A step's height over the smallest height that counts. A median has π/2 times the variance of a mean."""
    before, after = _beside(logs, begin, index, end)
    deviation = sigma * sqrt(pi / 2 * (1 / len(before) + 1 / len(after)))
    return abs(median(after) - median(before)) / max(MIN_CHANGE, DEVIATIONS * deviation)


def _step(logs: Sequence[float], begin: int, index: int, end: int) -> Step:
    before, after = _beside(logs, begin, index, end)
    return Step(index, exp(median(before)), exp(median(after)))
