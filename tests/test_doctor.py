"""The doctor names what is missing and how to get it, and tries a measurement whose answer is known."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from packaging.requirements import Requirement

from optexp.commands import doctor
from optexp.commands.architecture import Architecture, lines
from optexp.measurement.gpu import Gpu
from optexp.measurement.machine_load import MachineLoad
from optexp.measurement.settings import MeasurementSettings
from optexp.measurement.watchdogs import WATCHDOGS
from optexp.records.measurement import Control
from tests.measurement.conftest import gpu, nvml  # noqa: F401
from tests.measurement.nvml import Nvml
from tests.measurement.samples import constant, made

CPU = torch.device("cpu")


def test_this_installation_is_complete() -> None:
    found = {finding.name: finding for finding in doctor.installation()}
    assert {"Python", "torch", "hydra-core", "mlflow", "pyarrow"} <= found.keys()
    assert [name for name, finding in found.items() if finding.ok is False] == []


@pytest.mark.parametrize(("wanted", "text"), [("no-such-package>=1", "is not installed"), ("torch>=99", "")])
def test_a_package_that_is_missing_or_too_old_says_what_to_install(wanted: str, text: str) -> None:
    finding = doctor._package(Requirement(wanted))
    assert finding.ok is False
    assert text in finding.text
    assert f"pip install '{wanted}'" in str(finding)


def test_tools_are_found_on_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "none"))
    tool = tmp_path / "ncu"
    tool.write_text("#!/bin/sh\necho 'NVIDIA (R) Nsight Compute\nVersion 2025.3.1.0 (build 1)'\n")
    tool.chmod(0o755)
    found = {finding.name: finding for finding in doctor.tools(CPU)}
    assert found["ncu"].text == f"{tool}, 2025.3.1.0"
    assert found["nsys"].ok is None
    assert "not found" in found["nsys"].text


def test_a_card_is_described_with_its_compiler_flag(gpu: Gpu, nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: F811
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_80", "sm_90"])
    found = {finding.name: finding for finding in doctor.card(gpu)}
    assert "Example GPU, driver 580.1" in found["GPU"].text
    assert "-gencode=arch=compute_90,code=sm_90" in found["compute capability"].text
    assert "TORCH_CUDA_ARCH_LIST=9.0" in found["compute capability"].text
    assert "45 °C, 350 W of 700 W" in found["now"].text
    assert all(finding.ok for finding in found.values())
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_70"])
    nvml.reasons, nvml.running = 0x20, {os.getppid(): 2**30, 2**22 + 1: None}
    found = {finding.name: finding for finding in doctor.card(gpu)}
    assert found["compute capability"].ok is False
    assert found["now"].ok is False
    assert "thermal slow-down" in found["now"].text
    assert found["other programs"].ok is None  # whoever asked is there, and one that has no id here


@pytest.mark.parametrize(
    ("slower", "noise", "processes", "ok"), [(1.0, 1e-4, 5, True), (1.0, 0.5, 5, None), (1.1, 1e-4, 5, False)]
)
def test_the_verdict_on_equal_arms(slower: float, noise: float, processes: int, ok: bool | None) -> None:
    samples = made(constant(1e-3), constant(1e-3 * slower), noise=noise, processes=processes)
    finding = doctor.equal(samples, SimpleNamespace(settings=MeasurementSettings()))  # type: ignore[arg-type]
    assert finding.ok is ok
    assert f"{processes} processes" in finding.text


def test_what_had_nothing_to_look_at_is_not_ticked() -> None:
    assert str(doctor.Finding("throttling", True, "no clocks")).startswith("  ✓ ")
    assert str(doctor.Finding("throttling", True, "no clocks", checked=False)).startswith("  – ")
    samples = made(constant(1e-3), constant(1e-3))
    looked = {watch.name: watch.looked for watch in (watchdog(samples) for watchdog in WATCHDOGS)}
    assert not any(looked[name] for name in ("throttling", "power cap", "foreign processes", "device and wall"))
    assert all(looked[name] for name in ("recompilation", "skipped steps", "modes"))


def test_a_control_has_a_size_and_a_skipped_one_no_tick() -> None:
    skipped = doctor.of_control("known delay", Control("delay", True, True, "skipped: warm caches"))
    assert str(skipped).startswith("  – ")
    wide = doctor.of_control("A/A", Control("A/A", True, False, "1.00×", 1.0, 0.9, 1.1))
    assert "→ differences below 1.10× are INCONCLUSIVE here: a quieter machine" in str(wide)


def test_how_long_it_takes_is_said_first() -> None:
    assert doctor.announcement(False, MachineLoad(0.1, 4)) == "about 50 s; --quick takes about 10 s"
    busy = doctor.announcement(False, MachineLoad(7.0, 2))
    assert busy == "about 1 min; the machine is busy: 7.0 processes share 2 cores; --quick takes about 40 s"
    assert doctor.announcement(True, MachineLoad(0.1, 4)) == "about 10 s"


@pytest.mark.slow
def test_the_whole_examination_without_a_gpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "optexp.doctor", "--quick", "--device", "cpu"]
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)}
    quiet, start = os.getloadavg()[0] < 0.3, time.monotonic()
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=200)
    assert not quiet or time.monotonic() - start < 10
    assert "A known answer" in done.stdout, done.stderr
    for name in ("Python", "ncu", "against itself", "A/A", "known delay", "throttling"):
        assert f" {name} " in done.stdout
    assert "Traceback" not in done.stderr
    assert done.stderr.startswith("optexp.doctor: about ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [(1980, 1980, "look locked"), (1980, 1995, "locked or not"), (1200, 1980, "not locked")],
)
def test_whether_clocks_are_locked_is_said_in_words(low: float, high: float, words: str) -> None:
    assert words in doctor.held(low, high)


CARDS = [
    # capability, built for, torch's CUDA, the driver's, nvcc; whether each line is fine
    ((9, 0), ["sm_80", "sm_90"], "13.0", "13.1", "13.0", {"kernels of torch": True, "CUDA": True, "nvcc": True}),
    ((8, 6), ["sm_80", "sm_90"], "12.8", "12.4", "12.6", {"kernels of torch": None, "CUDA": True, "nvcc": True}),
    ((7, 0), ["sm_80", "sm_90"], "13.0", "12.4", "12.6", {"kernels of torch": False, "CUDA": False, "Triton": None}),
    ((12, 0), ["sm_90", "compute_90"], "12.8", "12.8", "11.8", {"kernels of torch": None, "nvcc": None}),
]


@pytest.mark.parametrize(("capability", "built", "cuda", "driver", "nvcc", "expected"), CARDS)
def test_an_architecture_means_this_for_compilers(
    capability: tuple[int, int], built: list[str], cuda: str, driver: str, nvcc: str, expected: dict[str, bool | None]
) -> None:
    found = {line.name: line for line in lines(Architecture(capability, built, cuda, "580.1", driver, nvcc))}
    assert {name: found[name].ok for name in expected} == expected
    if capability == (9, 0):
        assert "TMA and wgmma" in found["Triton"].text
        assert "driver 580.1 runs up to 13.1" in found["CUDA"].text
