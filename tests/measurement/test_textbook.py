"""The textbook way is shown, with how often it errs, and never decides."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyarrow import parquet

from optexp.result import Verdict
from tests.measurement.test_rounds import job


@pytest.mark.slow
def test_it_gives_no_verdict_and_counts_its_own_errors(tmp_path: Path) -> None:
    sizes = ["workload.dim=16", "workload.layers=2", "workload.batch_size=8"]
    result = job(tmp_path, "workload=mlp", "strategy=baseline", "measurement=textbook", *sizes)
    assert result.verdict is Verdict.INCONCLUSIVE
    assert result.speedup is None
    facts = result.measurement.textbook
    assert len(facts.ratios) == len(facts.equal_arms) == 20
    assert facts.wrong == sum(not 1 / 1.01 <= ratio <= 1.01 for ratio in facts.equal_arms)
    assert f"in {facts.wrong} of 20" in result.headline
    assert result.candidate.step_us is not None
    rows = parquet.read_table(tmp_path / "samples.parquet").to_pylist()
    assert {(row["kind"], row["steps"]) for row in rows} == {("textbook main", 1), ("textbook same", 1)}
    assert len(rows) == 20 * 3 * 2 * 2  # repetitions, trials, kinds, arms
