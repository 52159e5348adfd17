"""Bounds beside measurements: how far below what was predicted at most each comparison's speedup is.

python tests/benchmarks/bounds.py FOLDER     of comparisons, as `every_verdict.py run FOLDER` makes them; Markdown
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from optexp.records.prediction import ABOVE
from optexp.result import Result
from optexp.support.units import ratio

NEAR = 1.3  # a measurement within this factor of its bound


def read(folder: Path) -> list[Result]:
    """Comparisons with a measured speedup."""
    found = (Result.read(path) for path in sorted(folder.rglob("result.json")))
    return [result for result in found if result.speedup is not None and result.verdict.measured]


def table(results: Iterable[Result]) -> str:
    """One row for each comparison, those nearest to their bound first; `–` where a strategy knows no bound."""
    known, rows = list[float](), list[tuple[float, str]]()
    for result in results:
        assert result.speedup is not None
        measured, found = result.speedup.estimate, result.profile.prediction
        cells = [f"`{result.workload}`", f"`{result.label}`", str(result.verdict)]
        if found is None:
            rows.append((-1.0, row([*cells, "–", ratio(measured), "–"])))
            continue
        known.append(found.ratio)
        beyond = " **beyond**" if found.refuted else ""
        most = ratio(found.prediction.speedup)
        rows.append((found.ratio, row([*cells, most, ratio(measured), f"{found.ratio:.2f}{beyond}"])))
    head = ["workload", "strategy", "verdict", "predicted at most", "measured", "measured/bound"]
    lines = [row(head), "|---|---|---|---:|---:|---:|", *(text for _, text in sorted(rows, reverse=True))]
    return "\n".join([*lines, "", summary(known, len(rows))])


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
