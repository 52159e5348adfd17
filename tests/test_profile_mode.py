"""mode=profile times what it shows, and says where the machine or the tracing disturbed it."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hydra import compose, initialize_config_dir

from optexp.comparison import runner
from optexp.comparison.modes import profile
from optexp.comparison.modes.profile import contradictions
from optexp.comparison.predictions import UNTRUSTED
from optexp.config import search_path
from optexp.measurement.clock import Timing
from optexp.measurement.gpu import Reading
from optexp.measurement.samples import Pair, Sample
from optexp.result import ArmSummary, Result, Verdict

SMALL = ["workload=mlp", "workload.dim=64", "workload.layers=2", "workload.batch_size=16", "device=cpu"]


def profiled(folder: Path, *overrides: str) -> Result:
    search_path.register()
    quick = ["mode=profile", "measurement=quick", "measurement.process_s=0.5", "measurement.warmup_s=0.2"]
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*SMALL, *quick, "tracking.enabled=false", *overrides])
    return runner.run(config, folder, show=lambda *_: None)


@pytest.mark.parametrize("isolation", ["none", "process"])
def test_the_step_is_one_of_many(tmp_path: Path, isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "contradictions", lambda *_: [])  # as tests that run beside this one make them
    found = profiled(tmp_path, f"isolation={isolation}")
    assert found.verdict is Verdict.PROFILED, found.headline
    step = found.baseline
    assert step.step_us is not None
    assert step.throughput == pytest.approx(16e6 / step.step_us)
    assert step.setup_s > 0
    physics = found.profile.baseline.roofline
    assert physics.bound.us or physics.bound.reason, "neither a bound nor why there is none"
    assert any(point.name == "aten::addmm" and point.flops for point in physics.points)
    names = [phase.name for phase in physics.startup]
    assert names[-4:] == ["first step", "second step", "third step", "steady step"]
    assert "build" in names
    assert all(phase.seconds >= 0 for phase in physics.startup)
    memory = found.profile.baseline.memory
    assert memory is not None
    assert step.peak_mib == pytest.approx(sum(memory.peak.values()) / 2**20, rel=0.01)
    assert "unknown" not in memory.peak, memory
    ranked = found.profile.predictions
    assert "strategy=fusion" in [p.strategy for p in ranked]
    assert [p.speedup for p in ranked] == sorted((p.speedup for p in ranked), reverse=True)
    assert all(p.step_us == step.step_us and 0 < p.bound_us <= p.step_us for p in ranked)


def session() -> Any:
    return SimpleNamespace(
        machine=SimpleNamespace(gpu=None),
        looking_out=lambda *_: lambda: None,
        settings=SimpleNamespace(pairs=10),
        draws=SimpleNamespace(seed=lambda name: 1),
        workload=SimpleNamespace(variety=1),
        working=lambda *_: nullcontext(),
        progress=SimpleNamespace(update=lambda *args, **kwargs: None),
        experiment=SimpleNamespace(verify="first", environment=SimpleNamespace(allow_foreign=False)),
        result=SimpleNamespace(baseline=ArmSummary(), notes=[]),
        samples=16,
    )


HOT = (Reading(0.0, reasons=("thermal slow-down",)),)


@pytest.mark.parametrize(
    ("seconds", "queued", "readings", "said"),
    [
        ([1e-3] * 10, 0.0, (), []),
        ([1e-3] * 10, 0.6, (), ["cores"]),
        ([1e-3, 3e-3] * 5, 0.0, (), ["spread"]),
        ([1e-3] * 10, 0.0, HOT, ["throttling"]),
    ],
)
def test_a_disturbance_is_named(
    seconds: list[float], queued: float, readings: Any, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = [Timing(20, s, None, queued=queued) for s in seconds]
    pairs = [Pair(timing, timing, True, readings=readings) for timing in blocks]
    monkeypatch.setattr(profile, "sample_alone", lambda *_: Sample(pairs=pairs))
    asked = session()
    found = profile.timed_alone(asked, None)  # type: ignore[arg-type]
    assert [text.partition(":")[0] for text in found] == said
    assert 1e3 <= asked.result.baseline.step_us <= 3e3


@pytest.mark.parametrize(
    ("traced_us", "step_us", "stretched", "said"),
    [
        (100.0, 110.0, 1.2, []),
        (142_000.0, 27_000.0, 1.0, ["timing and trace disagree"]),
        (100.0, 100.0, 7.0, ["tracing made a step 7.0 times slower"]),
        (None, 100.0, None, []),
    ],
)
def test_a_trace_that_contradicts_the_timing_is_named(
    traced_us: float | None, step_us: float, stretched: float | None, said: list[str]
) -> None:
    assert [text.partition(":")[0] for text in contradictions(traced_us, step_us, stretched)] == said


def test_a_disturbed_profile_is_not_to_be_relied_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "contradictions", lambda *_: ["timing and trace disagree: by far"])
    monkeypatch.setattr(profile, "DISTURBANCES", ())
    monkeypatch.setattr(profile, "WIDE", 1e9)
    monkeypatch.setattr(profile, "disagreement", lambda traces: f"tables disagree: {len(traces)} traces")
    found = profiled(tmp_path, "isolation=none")
    assert found.verdict is Verdict.PROFILED
    assert "not to be relied on: timing and trace disagree: by far" in found.headline
    assert "timing and trace disagree: by far" in found.notes
    assert UNTRUSTED in found.notes
    assert found.profile.predictions == []
    assert found.profile.suggestion is None, "advice from shares that are not to be relied on"
    assert any(note.startswith("tables disagree: ") for note in found.notes)
