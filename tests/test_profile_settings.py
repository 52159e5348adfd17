"""Keys below `profile`: schedule, region and stacks of a profile, checked before anything runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from optexp.comparison import runner
from optexp.config import search_path
from optexp.records.profile import ArmProfile
from optexp.result import Result, Verdict
from optexp.trace import Trace

MODEL = """
import torch, optexp
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(256, 512), nn.Linear(512, 256)

    def forward(self, x):
        with optexp.region("first"):
            x = self.first(x).relu()
        with optexp.region("second"):
            return self.second(x)

def get_inputs():
    return [torch.randn(64, 256), torch.randn(64, 256)]

def train_step(model, batch, optimizer):
    x, y = batch
    loss = nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss
"""


def run(folder: Path, *overrides: str, mode: str = "profile") -> Result:
    (folder / "model.py").write_text(MODEL)
    search_path.register()
    own = ["workload=module", f"workload.path={folder / 'model.py'}", "workload.mode=train"]
    quick = [f"mode={mode}", "measurement=quick", "measurement.process_s=0.3", "measurement.warmup_s=0.1"]
    given = {override.partition("=")[0] for override in overrides}
    standard = [each for each in ("device=cpu", "isolation=none") if each.partition("=")[0] not in given]
    rest = ["tracking.enabled=false", "environment.allow_foreign=true", *standard, *overrides]
    with initialize_config_dir(version_base="1.3", config_dir=str(search_path.CONF)):
        config = compose("config", overrides=[*own, *quick, *rest])
    return runner.run(config, folder / "out", show=lambda *_: None)


def arm(result: Result) -> ArmProfile:
    assert result.verdict is Verdict.PROFILED, result.headline
    assert result.profile.baseline is not None
    return result.profile.baseline


def names(rows: Sequence[object]) -> list[str]:
    return [row.name for row in rows]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    folder = tmp_path_factory.mktemp("plain")
    return folder, run(folder)


def test_a_users_loop_has_phases_regions_lines_and_files(plain: tuple[Path, Result]) -> None:
    folder, result = plain
    found = arm(result).ranges
    assert found is not None
    assert names(found.phases) == ["feed", "forward", "backward", "optimizer", "rest"]
    assert names(found.regions) == ["first", "second"]
    assert all(row.backward_host_us for row in found.regions)
    lines = {(row.operator, row.place.rpartition("/")[2]) for row in found.lines}
    first = MODEL[: MODEL.index("x = self.first(x)")].count("\n") + 1
    assert ("aten::linear", f"model.py:{first}") in lines
    assert ("aten::mse_loss", f"model.py:{MODEL[: MODEL.index('loss = nn')].count(chr(10)) + 1}") in lines
    assert found.origins["aten::relu"].endswith(f"model.py:{first}")
    for file in found.files:
        assert (folder / "out" / file.path).stat().st_size > 100, file
    assert len(found.files) == 6
    page = (folder / "out" / "report.html").read_text()
    assert "Phases, regions and lines" in page
    assert "open in Perfetto" in page


def test_the_record_is_read_back(plain: tuple[Path, Result]) -> None:
    folder, result = plain
    again = Result.read(folder / "out" / "result.json")
    assert again.profile.baseline == result.profile.baseline
    untimed = again.profile.untimed().baseline
    assert untimed is not None
    assert untimed.ranges is not None
    text = json.dumps([row.__dict__ for row in (*untimed.ranges.phases, *untimed.ranges.regions)])
    assert '_us": null' in text
    assert not any(value for row in untimed.ranges.lines for key, value in vars(row).items() if key.endswith("_us"))


def test_a_schedule_is_followed_and_the_median_recording_is_shown(tmp_path: Path) -> None:
    result = run(tmp_path, "profile.wait=2", "profile.warmup=1", "profile.active=7", "profile.repeat=3",
                 "profile.stacks=false")  # fmt: skip
    found = arm(result).ranges
    assert found is not None
    assert [cycle.steps for cycle in found.cycles] == [7, 7, 7]
    shown = [cycle for cycle in found.cycles if cycle.shown]
    times = sorted(cycle.step_us or 0.0 for cycle in found.cycles)
    assert [cycle.step_us for cycle in shown] == [times[1]]
    assert shown[0].path == "traces/baseline.json.gz"
    for cycle in found.cycles:
        assert len(Trace.read(tmp_path / "out" / cycle.path).steps) == 7
    assert not (tmp_path / "out" / "flamegraphs").exists()


def test_a_region_limits_tables_breakdown_and_diagnosis(tmp_path: Path) -> None:
    result = run(tmp_path, "profile.region=second")
    found = arm(result)
    assert found.ranges is not None
    assert found.ranges.region == "second"
    assert "of the region second" in result.headline
    operators = {row.name: row for row in found.operators}
    assert operators["aten::linear"].calls == 1
    assert "aten::relu" not in operators
    assert names(found.modules) == ["second"]
    assert 0.3 < found.modules[0].share <= 1.01
    whole = sum(row.host_share for row in found.ranges.phases)
    assert whole == pytest.approx(1.0, abs=1e-6)
    terms = sum(value for name, value in found.metrics.items() if name.startswith("share_"))
    assert terms == pytest.approx(1.0, abs=0.01)
    region = next(row for row in found.ranges.regions if row.name == "second")
    both = (region.host_us or 0.0) + (region.backward_host_us or 0.0)
    assert found.metrics["step_us"] == pytest.approx(both, rel=0.05)


def test_a_region_that_was_never_entered_is_a_mistake(tmp_path: Path) -> None:
    result = run(tmp_path, "profile.region=secnod")
    assert result.verdict is Verdict.ERROR
    assert "they entered first, second" in result.headline


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("profile.active=0", "active=0 must be at least 1"),
        ("profile.tool=nvprof", "nvprof is not allowed"),
        ("profile.stack=true", "there is no such key"),
    ],
)
def test_a_mistaken_key_is_said_at_once(override: str, said: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"+{override}" if "stack=" in override else override)
    assert result.verdict is Verdict.ERROR
    assert said in result.headline


@pytest.mark.parametrize("key", ["region=second", "tool=ncu"])
def test_what_is_for_one_program_is_refused_in_a_comparison(key: str, tmp_path: Path) -> None:
    result = run(tmp_path, f"profile.{key}", mode="compare")
    assert f"profile.{key} is for one program" in result.headline


@pytest.mark.gpu
def test_phases_regions_and_lines_of_a_training_loop_on_a_gpu(tmp_path: Path) -> None:
    result = run(tmp_path, "device=cuda", "isolation=process")
    found = arm(result).ranges
    assert found is not None
    phases = {row.name: row for row in found.phases}
    assert list(phases) == ["feed", "forward", "backward", "optimizer", "rest"], found.phases
    assert sum(row.device_share for row in phases.values()) == pytest.approx(1.0, abs=1e-3), found.phases
    for name in ("forward", "backward", "optimizer"):
        assert (phases[name].device_us or 0.0) > 0, f"no kernel was launched in {name}: {found.phases}"
    for row in found.regions:
        assert (row.device_us or 0.0) > 0, row
        assert (row.backward_device_us or 0.0) > 0, f"no backward kernel was joined: {row}"
    forward = sum(row.device_us or 0.0 for row in found.regions)
    assert forward <= (phases["forward"].device_us or 0.0) * 1.001, (found.regions, found.phases)
    assert any(row.operator == "aten::linear" and row.device_share > 0 for row in found.lines), found.lines


@pytest.mark.gpu
def test_a_region_on_a_gpu_has_a_breakdown_that_adds_up(tmp_path: Path) -> None:
    found = arm(run(tmp_path, "device=cuda", "profile.region=second", "isolation=process"))
    terms = {name: value for name, value in found.metrics.items() if name.startswith("share_")}
    assert sum(terms.values()) == pytest.approx(1.0, abs=0.01), terms
    assert found.ranges is not None
    region = next(row for row in found.ranges.regions if row.name == "second")
    assert found.metrics["kernels"] <= region.kernels, (found.metrics, region)
    assert found.metrics["kernels"] > 0, found.metrics
