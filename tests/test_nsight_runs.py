"""A program under an Nsight tool: the replayed steps, the command, what is kept, and the sentence where it fails."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from optexp.comparison import nsight
from optexp.profiling.settings import ProfileSettings
from optexp.records.nsight import ToolRun
from optexp.workers import replay
from optexp.workers.spec import Spec
from optexp.workloads.gelu import Gelu
from optexp.workloads.module import Module
from tests.profiling.test_nsight import KERNELS, PAGE

DENIED = "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters"


def session(folder: Path, tool: str, device: str = "cuda:0") -> Any:
    spec = Spec(Gelu(size=64), [], device="cpu", dtype="float32", seed=0)
    return SimpleNamespace(
        experiment=SimpleNamespace(profile=ProfileSettings(tool=tool)),
        output=folder,
        device=device,
        spec=lambda stack: spec,
        pool=SimpleNamespace(visible={"CUDA_VISIBLE_DEVICES": "0"}),
        working=lambda *_: nullcontext(),
    )


def fake(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program of that name, first on the PATH."""
    program = folder / "bin" / name
    program.parent.mkdir()
    program.write_text(f"#!{sys.executable}\nimport sys\narguments = sys.argv[1:]\n{script}")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=":")


def ran(folder: Path, tool: str, device: str = "cuda:0") -> ToolRun:
    found = nsight.run(session(folder, tool, device), ())
    assert found is not None
    return found


NCU = """
if "--import" in arguments:
    print({page!r})
else:
    open(arguments[arguments.index("--export") + 1] + ".ncu-rep", "w").write("report")
    print("==PROF== Connected")
"""

NSYS = """
if arguments[0] == "profile":
    where = next(a for a in arguments if a.startswith("--output=")).partition("=")[2]
    open(where + ".nsys-rep", "w").write("report")
else:
    where = next(a for a in arguments if a.startswith("--output=")).partition("=")[2]
    open(where + "_cuda_gpu_kern_sum.csv", "w").write({page!r})
"""


def test_kernels_advice_and_report_of_nsight_compute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "ncu", NCU.format(page=PAGE), monkeypatch)
    found = ran(tmp_path, "ncu")
    assert (found.reason, found.report) == ("", "nsight/baseline.ncu-rep")
    assert (tmp_path / found.report).exists()
    assert [row.launches for row in found.kernels] == [1, 2]
    assert found.advice
    for part in (
        "OPTEXP_NVTX=1",
        "CUDA_VISIBLE_DEVICES=0",
        "--set basic",
        "--launch-count 100",
        "optexp.workers.replay",
    ):
        assert part in found.command


def test_summaries_of_nsight_systems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake(tmp_path, "nsys", NSYS.format(page=KERNELS), monkeypatch)
    found = ran(tmp_path, "nsys")
    assert (found.reason, found.report) == ("", "nsight/baseline.nsys-rep")
    assert [table.title for table in found.tables] == ["Kernels"]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (f"print({DENIED!r})", "ERR_NVGPUCTRPERM"),
        ("print('==PROF== hello')", "wrote no report: ==PROF== hello"),
        ("sys.exit(3)", "it printed nothing"),
    ],
)
def test_a_tool_that_measures_nothing_says_why(
    script: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake(tmp_path, "ncu", script, monkeypatch)
    found = ran(tmp_path, "ncu")
    assert said in found.reason
    assert "optexp.workers.replay" in found.command
    assert not found.kernels


@pytest.mark.parametrize("tool", ["ncu", "nsys"])
def test_without_the_tool_the_command_is_ready(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nsight, "find", lambda _: None)
    found = ran(tmp_path, tool)
    assert f"{tool} is not installed here" in found.reason
    assert f"{tool} " in found.command
    assert (tmp_path / "nsight" / "baseline.pkl").exists()


def test_on_a_cpu_no_tool_runs(tmp_path: Path) -> None:
    assert "on a CPU" in ran(tmp_path, "ncu", "cpu").reason


def test_no_tool_was_asked_for(tmp_path: Path) -> None:
    asked = session(tmp_path, "ncu")
    asked.experiment.profile = ProfileSettings()
    assert nsight.run(asked, ()) is None
    assert not list(tmp_path.iterdir())


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_a_packed_program_runs_in_a_process_of_its_own(tmp_path: Path) -> None:
    workload = Module(target="tests.test_nsight_runs:Own", inputs=[{"shape": [4, 8]}])
    spec = Spec(workload.resolve("cpu"), [], device="cpu", dtype="float32", seed=0)
    replay.pack(spec.pack(), tmp_path / "program.pkl")
    command = [sys.executable, "-m", "optexp.workers.replay", str(tmp_path / "program.pkl")]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=False)
    assert done.stdout.startswith("2 steps of "), done.stderr


@pytest.mark.gpu
def test_nsight_compute_measures_a_small_program(tmp_path: Path) -> None:
    """Where ncu is installed: real kernels with their numbers; where counters are refused: the sentence."""
    asked = session(tmp_path, "ncu")
    spec = Spec(Gelu(size=2048).resolve("cuda"), [], device="cuda:0", dtype="float32", seed=0)
    asked.spec = lambda stack: spec
    asked.experiment.profile = ProfileSettings(tool="ncu", kernels=4)
    found = nsight.run(asked, ())
    assert found is not None
    if nsight.find("ncu") is None:
        assert "not installed" in found.reason
        return
    if "ERR_NVGPUCTRPERM" in found.reason:
        pytest.skip(found.reason)
    assert not found.reason, f"{found.reason}\n{found.command}"
    assert (tmp_path / found.report).stat().st_size > 1000
    assert found.kernels, f"no kernel in the report of {found.command}"
    top = found.kernels[0]
    for name in ("us", "sm_percent", "memory_percent", "occupancy_percent", "registers"):
        assert getattr(top, name), f"{name} of {top} is missing"
    assert sum(row.launches for row in found.kernels) <= 4


@pytest.mark.gpu
@pytest.mark.skipif(shutil.which("ncu") is None, reason="ncu is not installed")
def test_nsight_compute_sees_the_phases_as_nvtx_ranges(tmp_path: Path) -> None:
    spec = Spec(Gelu(size=1024).resolve("cuda"), [], device="cuda:0", dtype="float32", seed=0)
    replay.pack(spec.pack(), tmp_path / "program.pkl")
    command = ["ncu", "--nvtx", "--nvtx-include", "forward/", "--profile-from-start", "off", "--launch-count", "1"]
    command += ["--csv", sys.executable, "-m", "optexp.workers.replay", str(tmp_path / "program.pkl")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if "ERR_NVGPUCTRPERM" in done.stdout + done.stderr:
        pytest.skip("performance counters are refused")
    assert '"ID"' in done.stdout, f"no kernel inside the range forward:\n{done.stdout[-800:]}\n{done.stderr[-800:]}"
