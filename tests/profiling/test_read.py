"""Any trace of torch.profiler is read as it is: steps of ours, of the profiler's schedule, of a name, or none."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from optexp.commands.read import NOT_VERIFIED, main, reading
from optexp.errors import ConfigError
from optexp.profiling import any_trace, calibration
from optexp.records.profile import Calibration
from optexp.trace import STEP


def recorded(path: Path, step: Callable[[], object], steps: int = 3, mark: str | None = None) -> Path:
    """As users record: with a schedule, or with a range of their own around each step."""
    plan = None if mark else schedule(wait=1, warmup=1, active=steps)
    with profile(activities=[ProfilerActivity.CPU], schedule=plan, record_shapes=True) as profiler:
        for _ in range(steps if mark else steps + 2):
            if mark:
                with record_function(mark):
                    step()
            else:
                step()
                profiler.step()
    profiler.export_chrome_trace(str(path))
    return path


@pytest.fixture(scope="module")
def work() -> Callable[[], object]:
    layer, x = nn.Linear(256, 256), torch.randn(256, 256)
    return lambda: torch.tanh(layer(x)).sum()


def test_steps_of_a_schedule(tmp_path: Path, work: Callable[[], object]) -> None:
    trace = any_trace.read(recorded(tmp_path / "trace.json", work))
    assert len(trace.steps) == 3
    assert sum(op.name == "aten::tanh" for op in trace.ops) == 3


def test_steps_by_name_and_none_at_all(tmp_path: Path, work: Callable[[], object]) -> None:
    path = recorded(tmp_path / "trace.json", work, mark="train step 7")
    assert len(any_trace.read(path, r"train step \d+").steps) == 3
    assert len(any_trace.read(path).steps) == 1
    with pytest.raises(ConfigError, match="no range has a name that 'epoch' matches"):
        any_trace.read(path, "epoch")


def test_our_own_steps_count_before_the_schedules(tmp_path: Path, work: Callable[[], object]) -> None:
    path = recorded(tmp_path / "trace.json", work, steps=2, mark=STEP)
    assert len(any_trace.read(path).steps) == 2


def test_shares_add_up_and_products_are_named(tmp_path: Path) -> None:
    layer, x = nn.Linear(1024, 1024), torch.randn(1024, 1024)
    found = reading(recorded(tmp_path / "trace.json", lambda: layer(x)))
    assert sum(found.breakdown.terms.values()) == pytest.approx(1)
    assert "matrix_products" in {bottleneck.label for bottleneck in found.bottlenecks}
    assert not any("amp" in text for bottleneck in found.bottlenecks for text in bottleneck.try_)


def test_two_traces_are_explained_and_marked_as_not_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    x = torch.randn(2048, 2048)
    first = recorded(tmp_path / "first.json", lambda: torch.exp(torch.tanh(x)))
    second = recorded(tmp_path / "second.json", lambda: torch.exp(x))
    out, page = tmp_path / "found.json", tmp_path / "found.md"
    assert main([str(first), str(second), "--json", str(out), "--markdown", str(page)]) == 0
    shown, record = capsys.readouterr().out, json.loads(out.read_text())
    assert "(gone: aten::tanh), −" in " ".join(shown.split())
    assert NOT_VERIFIED in " ".join(shown.split())
    assert "first.json: 3 steps of" in shown
    assert [each["verified"] for each in record["traces"]] == [False, False]
    assert {row["name"] for row in record["traces"][0]["profile"]["operators"]} >= {"aten::tanh", "aten::exp"}
    assert any("aten::tanh" in sentence for sentence in record["why"])
    assert "| `aten::tanh` | activation | 1 |" in page.read_text()
    assert "| [`tanh_out`](https://github.com/search?" in page.read_text()
    assert "| [native_functions.yaml:" in page.read_text()


def test_a_gpus_trace_has_bounds_and_its_cards_ceilings(
    tmp_path: Path, chrome: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    build = chrome()
    for _ in range(3):
        build.op("aten::mm", host_us=50.0, gpu_us=20.0)
        build.op("aten::add", host_us=50.0, gpu_us=5.0)
    asked: list[str] = []
    monkeypatch.setattr(calibration, "of_device", lambda name: asked.append(name))
    path = tmp_path / "gpu.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump({"traceEvents": build.events, "deviceProperties": [{"name": "NVIDIA H100", "numSms": 132}]}, file)
    found = reading(path)
    assert asked == ["NVIDIA H100"]
    assert found.trace.device == "NVIDIA H100"
    assert [bound.us for bound in found.bounds] == sorted((bound.us for bound in found.bounds), reverse=True)
    assert found.bounds[-1].us == pytest.approx(75.0)
    assert found.bounds[-1].us < found.breakdown.wall_us


def test_the_latest_calibration_of_a_card_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibration, "kept", lambda name: tmp_path / name)
    assert calibration.of_device("a card") is None
    calibration.write(tmp_path / "calibration-1.json", Calibration("a card", 1e12))
    calibration.write(tmp_path / "calibration-2.json", Calibration("another", 2e12))
    assert calibration.of_device("a card") == Calibration("a card", 1e12)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "cannot be read as JSON"),
        ("{}", "no list of traceEvents"),
        ("[]", "no operator"),
        ('"x"', "no Chrome trace"),
    ],
)
def test_what_is_no_trace(tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    assert main([str(path)]) == 2
    assert reason in capsys.readouterr().err
    assert main([str(tmp_path / "absent.json")]) == 2
