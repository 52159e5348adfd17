"""The clock's self-test."""

import time
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

from optexp import discovery, runner
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


def test_fifty_milliseconds_are_measured_as_fifty(tmp_path: Path):
    """Against the system's own timer, which wakes a sleeper a little late and never early."""
    discovery.register()
    settings = ["device=cpu", "isolation=none", "measurement=quick", "measurement.pairs=10", "tracking.enabled=false"]
    settings += ["measurement.warmup_s=0.5", "measurement.profile_steps=1"]
    with initialize_config_dir(version_base="1.3", config_dir=str(discovery.CONF)):
        config = compose("config", overrides=["workload=sleep", *settings])
    result = runner.run(config, tmp_path)
    assert result.verdict.measured, result.headline
    assert result.baseline.step_us == pytest.approx(50_000, rel=0.01)
    assert result.candidate.step_us == pytest.approx(50_000, rel=0.01)
