"""The clock's self-test."""

import time
from pathlib import Path
from statistics import median

import pytest
import torch
from hydra import compose, initialize_config_dir
from pyarrow import parquet

from optexp.comparison import runner
from optexp.config import search_path
from optexp.records import filenames
from optexp.workloads.sleep import Sleep


def test_a_step_waits_and_returns_its_batch():
    workload = Sleep(ms=20)
    program = workload.build(torch.device("cpu"), torch.float32, seed=0)
    batch = workload.batch(torch.Generator().manual_seed(0))
    program.feed.reset([batch])
    start = time.monotonic()
    output = program.run()["output"]
    assert time.monotonic() - start >= 0.02
    assert torch.equal(output, batch[0])


@pytest.mark.slow
def test_fifty_milliseconds_are_measured_as_fifty(tmp_path: Path):
    """The quicker blocks within 1 %, and what this machine's own timer is late by: a busy machine slows others."""
    search_path.register()
    settings = ["device=cpu", "isolation=none", "measurement=quick", "measurement.pairs=10", "tracking.enabled=false"]
    settings += ["measurement.warmup_s=0.5", "measurement.verification_seeds=1", "measurement.profile_steps=1"]
    settings += ["profile.details=false"]
    settings += ["measurement.min_effect=0.2"]  # a busy machine disturbs by less
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=["workload=sleep", *settings])
    result = runner.run(config, tmp_path)
    assert result.verdict.measured, result.headline
    late = median(_sleep_s(0.05) for _ in range(20)) - 0.05
    blocks = parquet.read_table(tmp_path / filenames.SAMPLES).to_pylist()
    for name in ("baseline", "candidate"):
        steps = sorted(block["wall_us"] for block in blocks if block["arm"] == name)
        assert len(steps) >= 10
        assert steps[0] >= 50_000
        assert steps[len(steps) // 4] <= 50_000 * 1.01 + 2e6 * late
        assert steps[0] <= getattr(result, name).step_us <= steps[-1]


def _sleep_s(seconds: float) -> float:
    start = time.monotonic()
    time.sleep(seconds)
    return time.monotonic() - start
