"""How well steps in a series of step times are found: synthetic series, and a public one.

    python tests/benchmarks/change_points.py [--otava apache_otava-0.8.0.tar.gz] [--into PAGE.md]

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
from math import exp, log1p, pi, sin
from pathlib import Path
from random import Random
from statistics import median

from scipy.stats import ttest_ind

from optexp.measurement import change_points

TOLERANCE = 3  # points between a step and its alarm
MARGIN = 10  # points without a step at both ends
APART = 20  # points between steps, at least
SIZES = (0.02, 0.03, 0.05, 0.07, 0.10, 0.20)
NOISE = (0.005, 0.01, 0.02)
OUTLIERS = 0.03  # share of points
DRIFT = 0.01  # amplitude
AROUND = 10  # points on each side of the t-test, and before the threshold's point
TIGERBEETLE = (16, 71, 97)  # as the test that holds the series draws its levels
Detector = Callable[[Sequence[float]], list[int]]


@dataclass(frozen=True)
class Case:
    """A series with its true steps, as index and relative size."""

    values: list[float]
    steps: dict[int, float] = field(default_factory=dict)
    noise: float = 0.0


@dataclass
class Count:
    """Alarms and steps, over many series."""

    hits: int = 0
    steps: int = 0
    alarms: int = 0
    found: dict[float, list[bool]] = field(default_factory=dict)

    def add(self, case: Case, alarms: Sequence[int]) -> None:
        """An alarm hits the nearest step within the tolerance; a second alarm of a step is false."""
        hit = {at for at in case.steps if any(abs(alarm - at) <= TOLERANCE for alarm in alarms)}
        self.hits, self.steps, self.alarms = (
            self.hits + len(hit),
            self.steps + len(case.steps),
            self.alarms + len(alarms),
        )
        for at, size in case.steps.items():
            self.found.setdefault(abs(size), []).append(at in hit)

    @property
    def precision(self) -> float:
        return self.hits / self.alarms if self.alarms else 1.0

    @property
    def recall(self) -> float:
        return self.hits / self.steps if self.steps else 1.0


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
    found: dict[str, Detector] = {"optexp.watch": ours}
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


def percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def synthetic(count: int) -> list[str]:
    """Precision and recall of each detector over series with and without steps."""
    rows = [f"| detector | precision | recall | {' | '.join(f'{100 * size:.0f} %' for size in SIZES)} |"]
    rows.append("|---" * (3 + len(SIZES)) + "|")
    for name, detect in detectors().items():
        total = Count()
        for case in cases(1, count):
            total.add(case, detect(case.values))
        by_size = " | ".join(percent(sum(total.found[size]) / len(total.found[size])) for size in SIZES)
        rows.append(f"| {name} | {percent(total.precision)} | {percent(total.recall)} | {by_size} |")
    return rows


def by_noise(count: int) -> list[str]:
    """Recall of our detector by the noise of the series."""
    rows = [f"| noise | {' | '.join(f'{100 * size:.0f} %' for size in SIZES)} |", "|---" * (1 + len(SIZES)) + "|"]
    for noise in NOISE:
        total = Count()
        for case in (case for case in cases(1, count) if case.noise == noise):
            total.add(case, ours(case.values))
        cells = (percent(sum(total.found[size]) / len(total.found[size])) for size in SIZES)
        rows.append(f"| {100 * noise:.1f} % | {' | '.join(cells)} |")
    return rows


def equal(count: int) -> list[str]:
    """Alarms in series of 1,000 points without a step, with and without drift."""
    rows = ["| detector | no drift | drift of 1 % |", "|---|---|---|"]
    for name, detect in detectors().items():
        cells = []
        for drift in (0.0, DRIFT):
            random = Random(2)
            found = [detect(series(random, 1000, NOISE[n % len(NOISE)], 0, drift).values) for n in range(count)]
            cells.append(f"{sum(map(len, found))} in {count} series")
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def as_it_grows(length: int = 1000, seeds: int = 3) -> int:
    """Places that ever raised an alarm while equal points came in one by one."""
    alarms = 0
    for seed in range(seeds):
        values = series(Random(seed), length, 0.01, 0).values
        alarms += len({index for end in range(1, length + 1) for index in ours(values[:end])})
    return alarms


def public(archive: Path) -> list[str]:
    case = tigerbeetle(archive)
    rows = ["| detector | alarms | hits | precision | recall |", "|---|---|---|---|---|"]
    for name, detect in detectors().items():
        total, alarms = Count(), detect(case.values)
        total.add(case, alarms)
        shown = ", ".join(map(str, alarms[:12])) + (", …" if len(alarms) > 12 else "")
        shares = f"{percent(total.precision)} | {percent(total.recall)}"
        rows.append(f"| {name} | {shown} | {total.hits} of {total.steps} | {shares} |")
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--series", type=int, default=600, help="synthetic series")
    parser.add_argument("--equal", type=int, default=60, help="series of 1,000 equal points")
    parser.add_argument("--otava", type=Path, help="source distribution of Apache Otava")
    parser.add_argument("--into", type=Path, help="page whose tables are replaced")
    asked = parser.parse_args()
    tables = {"synthetic": synthetic(asked.series), "noise": by_noise(asked.series), "equal": equal(asked.equal)}
    tables["grows"] = [f"While 1,000 equal points came in one by one, three times over: {as_it_grows()} alarms."]
    if asked.otava:
        tables["public"] = public(asked.otava)
    for name, rows in tables.items():
        print(f"\n{name}\n", *rows, sep="\n")
    if asked.into:
        text = asked.into.read_text()
        for name, rows in tables.items():
            begin, end = f"<!-- {name} -->\n\n", f"\n\n<!-- /{name} -->"
            head, _, rest = text.partition(begin)
            text = head + begin + "\n".join(rows) + end + rest.partition(end)[2]
        asked.into.write_text(text)


if __name__ == "__main__":
    main()
