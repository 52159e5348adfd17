"""Bounds beside measurements: how far below what was predicted at most each comparison's speedup is.

python tests/benchmarks/bounds.py FOLDER        comparisons, as `every_verdict.py run FOLDER` makes them; Markdown
python tests/benchmarks/bounds.py STORE.json    subsets, as `auto_against_subsets.py STORE.json` makes them
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # of a checkout

from optexp.records.prediction import ABOVE
from optexp.support.units import ratio
from tests.benchmarks import auto_against_subsets as subsets
from tests.benchmarks import every_verdict
from tests.benchmarks.kept import Kept

NEAR = 1.3  # a measurement within this factor of its bound


@dataclass(frozen=True)
class Pair:
    """A measured comparison.

    measured:  its speedup
    predicted: the largest speedup that its bound allows; None where the strategy has no bound
    """

    workload: str
    strategy: str
    verdict: str
    measured: float
    predicted: float | None

    @property
    def of_bound(self) -> float:
        """Measured over predicted; -1 without a bound."""
        return self.measured / self.predicted if self.predicted else -1.0


def read(store: Path) -> list[Pair]:
    """Comparisons with a measured speedup: of subsets, or of strategies alone."""
    if any("subject" in facts for facts in json.loads(store.read_text())):
        jobs = [job for job in subsets.read(store).values() if job.kind == subsets.SUBSET]
        return [Pair(j.subject, j.stack, j.verdict, j.speedup, j.predicted) for j in jobs if j.speedup is not None]
    pairs = Kept(store, every_verdict.Pair).rows().values()
    return [Pair(p.workload, p.strategy, p.verdict, p.estimate, p.predicted) for p in pairs if p.estimate is not None]


def table(pairs: Iterable[Pair]) -> str:
    """One row for each comparison, those nearest to their bound first; `–` where a strategy knows no bound."""
    ordered = sorted(pairs, key=lambda pair: pair.of_bound, reverse=True)
    head = ["workload", "strategy", "verdict", "predicted at most", "measured", "measured/bound"]
    lines = [row(head), "|---|---|---|---:|---:|---:|", *(row(cells(pair)) for pair in ordered)]
    ratios = [pair.of_bound for pair in ordered if pair.predicted]
    return "\n".join([*lines, "", summary(ratios, len(ordered))])


def cells(pair: Pair) -> list[str]:
    named = [f"`{pair.workload}`", f"`{pair.strategy}`", pair.verdict]
    if not pair.predicted:
        return [*named, "–", ratio(pair.measured), "–"]
    beyond = " **beyond**" if pair.of_bound > ABOVE else ""
    return [*named, ratio(pair.predicted), ratio(pair.measured), f"{pair.of_bound:.2f}{beyond}"]


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def summary(ratios: Sequence[float], comparisons: int) -> str:
    """Shares of the comparisons that have a bound."""
    if not ratios:
        return f"None of {comparisons} comparisons has a bound."
    within = sum(value <= ABOVE for value in ratios)
    near = sum(1 / NEAR <= value <= NEAR for value in ratios)
    count = len(ratios)
    return (
        f"{count} of {comparisons} comparisons have a bound. Measured/bound is at most {ABOVE:g} in {within} of {count}"
        f" ({within / count:.0%}), and within a factor of {NEAR:g} of 1 in {near} of {count} ({near / count:.0%})."
    )


if __name__ == "__main__":
    print(table(read(Path(sys.argv[1])))) if len(sys.argv) == 2 else sys.exit(__doc__)
