"""How well steps in a series of step times are found: synthetic series, and a public one.

    python tests/benchmarks/change_points.py [--otava apache_otava-0.8.0.tar.gz] [--record FOLDER]

Synthetic series have lognormal noise, outliers, slow drift and 0 to 3 steps of 2 to 20 %. `--otava` reads the series of
TigerBeetle's benchmark out of Apache Otava's source distribution:
pip download --no-deps --no-binary :all: apache-otava==0.8.0. Needs the extra [watch]. With Apache Otava installed, its
E-divisive joins the table.
"""

from __future__ import annotations

import argparse
import ast
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from math import exp, log1p, pi, sin
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from scipy.stats import ttest_ind

from optexp.measurement import change_points
from optexp.pages.blocks import keep
from optexp.pages.record import Record
from optexp.pages.rules.detections import OURS

POINTS = 1000  # of a series without a step
MARGIN = 10  # points without a step at both ends
APART = 20  # points between steps, at least
SIZES = (0.02, 0.03, 0.05, 0.07, 0.10, 0.20)
NOISE = (0.005, 0.01, 0.02)
OUTLIERS = 0.03  # share of points
DRIFT = 0.01  # amplitude
AROUND = 10  # points on each side of the t-test, and before the threshold's point
TIGERBEETLE = (16, 71, 97)  # as the test that holds the series draws its levels
Row = dict[str, Any]
Detector = Callable[[Sequence[float]], list[int]]


@dataclass(frozen=True)
class Case:
    """A series with its true steps, as index and relative size."""

    values: list[float]
    steps: dict[int, float] = field(default_factory=dict)
    noise: float = 0.0


# --- series --------------------------------------------------------------------------------------------------------


def series(random: Random, length: int, noise: float, count: int, drift: float = DRIFT) -> Case:
    """Times in µs. Outliers are slower by 3 % and an exponential of 15 %."""
    places: list[int] = []
    while len(places) < count:
        at = random.randrange(MARGIN, length - MARGIN)
        if all(abs(at - other) >= APART for other in places):
            places.append(at)
    steps = {at: random.choice(SIZES) * random.choice((1, -1)) for at in sorted(places)}
    periods, phase = random.uniform(0.5, 1.5), random.uniform(0, 2 * pi)
    values = []
    for n in range(length):
        level = sum(log1p(size) for at, size in steps.items() if n >= at)
        outlier = 0.03 + random.expovariate(1 / 0.15) if random.random() < OUTLIERS else 0.0
        moved = drift * sin(2 * pi * periods * n / length + phase)
        values.append(500 * exp(level + moved + outlier + random.gauss(0, noise)))
    return Case(values, steps, noise)


def tigerbeetle(archive: Path) -> Case:
    """The series in Apache Otava's tests, as time: the inverse of throughput."""
    with tarfile.open(archive) as files:
        name = next(name for name in files.getnames() if name.endswith("tests/tigerbeetle_test.py"))
        source = files.extractfile(name)
        assert source
        tree = ast.parse(source.read())
    lists = [node for node in ast.walk(tree) if isinstance(node, ast.List) and len(node.elts) > 300]
    return Case([1e9 / value for value in ast.literal_eval(lists[0])], dict.fromkeys(TIGERBEETLE, 0.0))


# --- detectors -------------------------------------------------------------------------------------------------------


def ours(values: Sequence[float]) -> list[int]:
    return [step.index for step in change_points.steps(values)]


def t_test(values: Sequence[float], level: float = 0.01) -> list[int]:
    """Welch's test of the points before and after each place; of neighbouring places the smallest p."""
    p = [
        float(ttest_ind(values[n - AROUND : n], values[n : n + AROUND], equal_var=False).pvalue)
        for n in range(AROUND, len(values) - AROUND + 1)
    ]
    return [
        n + AROUND for n, value in enumerate(p) if value < level and value == min(p[max(0, n - AROUND) : n + AROUND])
    ]


def threshold(values: Sequence[float], limit: float = 0.07) -> list[int]:
    """A point that differs by more than 7 % from the median of the points before it; alarms in a row are one."""
    alarms: list[int] = []
    for n in range(AROUND, len(values)):
        if abs(values[n] / median(values[n - AROUND : n]) - 1) > limit and not (alarms and n - alarms[-1] < AROUND):
            alarms.append(n)
    return alarms


def e_divisive(values: Sequence[float]) -> list[int]:
    """Apache Otava with its own defaults."""
    from otava.analysis import compute_change_points

    return [int(point.index) for point in compute_change_points(list(values))[0]]


def detectors() -> dict[str, Detector]:
    found: dict[str, Detector] = {OURS: ours}
    try:
        import otava.analysis  # noqa: F401

        found["E-divisive (Apache Otava)"] = e_divisive
    except ImportError:
        pass
    return {**found, "t-test, p < 0.01": t_test, "threshold of 7 %": threshold}


# --- tables ----------------------------------------------------------------------------------------------------------


def cases(seed: int, count: int) -> Iterator[Case]:
    random = Random(seed)
    for n in range(count):
        yield series(random, 150, NOISE[n % len(NOISE)], n % 4)


def synthetic(count: int) -> list[Row]:
    """Alarms of each detector in series with and without steps."""
    return [
        {
            "noise": case.noise,
            "steps": list(case.steps.items()),
            "alarms": {name: detect(case.values) for name, detect in detectors().items()},
        }
        for case in cases(1, count)
    ]


def equal(count: int) -> list[Row]:
    """Alarms in series without a step, with and without drift."""
    rows = []
    for name, detect in detectors().items():
        for drift in (0.0, DRIFT):
            random = Random(2)
            found = [detect(series(random, POINTS, NOISE[n % len(NOISE)], 0, drift).values) for n in range(count)]
            alarms = sum(map(len, found))
            rows.append({"detector": name, "drift": drift, "series": count, "points": POINTS, "alarms": alarms})
    return rows


def growing(seeds: int = 3) -> list[Row]:
    """Places that ever raised an alarm while equal points came in one by one."""
    rows = []
    for seed in range(seeds):
        values = series(Random(seed), POINTS, 0.01, 0).values
        alarms = {index for end in range(1, POINTS + 1) for index in ours(values[:end])}
        rows.append({"seed": seed, "points": POINTS, "alarms": len(alarms)})
    return rows


def public(archive: Path) -> list[Row]:
    case = tigerbeetle(archive)
    steps = list(case.steps)
    return [{"detector": name, "steps": steps, "alarms": detect(case.values)} for name, detect in detectors().items()]


def versions() -> str:
    names = ("numpy", "ruptures", *(["apache-otava"] if len(detectors()) > 3 else []))
    return f"Any: the series are drawn from fixed seeds. {', '.join(f'{name} {version(name)}' for name in names)}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=600, help="synthetic series")
    parser.add_argument("--equal", type=int, default=60, help="series of equal points")
    parser.add_argument("--otava", type=Path, help="source distribution of Apache Otava")
    parser.add_argument(
        "--record", type=Path, metavar="FOLDER", help="of the records; experiments/results/data: also the page"
    )
    asked = parser.parse_args()
    found = {"": ("synthetic", synthetic(asked.series)), ".equal": ("equal", equal(asked.equal))}
    found[".growing"] = "growing", growing()
    if asked.otava:
        found[".public"] = "public", public(asked.otava)
    for block, (table, rows) in found.items():
        record = Record("detections", versions() * (not block), rows, {"table": table})
        print(f"\n{record.text()}")
        if asked.record:
            keep(record, f"change_points{block}", asked.record)


if __name__ == "__main__":
    main()
