"""A sweep says which strategy is best for which workload, in a sentence, a table and a picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from optexp.records import filenames
from optexp.reporting.ranking import rows
from optexp.result import Result, Verdict
from optexp.sweeps import overview
from optexp.sweeps.heat_map import HeatMap

RESULTS = {path.stem: Result.read(path) for path in (Path(__file__).parents[1] / "results").glob("*.json")}
FASTER = RESULTS["faster"]
SPEEDUP = FASTER.speedup
assert SPEEDUP
SWEEP = [
    replace(FASTER, strategy=["amp"], speedup=replace(SPEEDUP, low=2.0, estimate=9.0, high=12.0)),
    replace(FASTER, strategy=["fusion"], speedup=replace(SPEEDUP, low=3.0, estimate=3.1, high=3.2)),
    replace(FASTER, workload="gelu", strategy=["amp"], verdict=Verdict.INCONCLUSIVE),
    RESULTS["not_equivalent"],
]


def test_the_best_is_the_one_whose_gain_is_surest() -> None:
    sentences = overview.best(rows(SWEEP))
    assert sentences[0] == "**mlp**: fusion, at least 3.00×"
    assert sentences[1] == "**gelu**: none of 1 is FASTER"


def test_one_cell_for_each_workload_and_strategy_and_no_figure_that_is_not_proven(tmp_path: Path) -> None:
    overview.draw(rows(SWEEP), tmp_path)
    assert all((tmp_path / name).stat().st_size > 5000 for name in (filenames.HEAT_MAP, filenames.SPEEDUPS))
    assert ("gelu", "amp") in HeatMap.of(rows(SWEEP)).cells
    assert "| FASTER | 3.00× |" in overview.markdown(rows(SWEEP))
