"""What a card says arrives in the units people use, and what it does not say is None."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from optexp.comparison.session import Session
from optexp.config import Experiment
from optexp.measurement.environment import describe
from optexp.measurement.gpu import Gpu, between, slowing
from optexp.reporting.terminal import Progress
from optexp.support.stopwatch import Stopwatch
from tests.measurement.nvml import Nvml

NVML_INDEX = torch.cuda._get_nvml_device_index  # which the card to order replaces


def test_units_and_words(nvml: Nvml, gpu: Gpu) -> None:
    nvml.reasons = 0x20 | 0x04 | 0x01  # thermal, power cap, idle
    said = gpu.read()
    assert (said.sm_mhz, said.memory_mhz, said.power_w, said.energy_j, said.temperature_c) == (
        1980,
        2619,
        350,
        1000,
        45,
    )
    assert said.reasons == ("power cap", "thermal slow-down")
    assert said.slowed == ("thermal slow-down",)
    nvml.held_ns = {0: 5 * 10**8, 1: 2 * 10**9}
    assert gpu.read().held_s == {"power cap": 0.5, "thermal slow-down": 2.0}


@pytest.mark.parametrize(("held_ms", "counts"), [(0.0, False), (0.2, False), (5.0, True)])
def test_what_held_clocks_down_between_two_readings(nvml: Nvml, gpu: Gpu, held_ms: float, counts: bool) -> None:
    before = replace(gpu.read(), at_s=1.0)
    nvml.held_ns = {0: round(held_ms * 1e6), 1: round(held_ms * 1e6)}
    found = between([before, replace(gpu.read(), at_s=1.04)])
    assert found == (("power cap", "thermal slow-down") if counts else ())
    assert slowing(found) == (("thermal slow-down",) if counts else ())
    assert between([]) == ()


@pytest.mark.parametrize(("bit", "slowed"), [(0x08, True), (0x40, True), (0x80, True), (0x04, False), (0x02, False)])
def test_what_counts_as_slowed(nvml: Nvml, gpu: Gpu, bit: int, slowed: bool) -> None:
    nvml.reasons = bit
    assert bool(gpu.read().slowed) is slowed


def test_a_card_that_tells_little(nvml: Nvml, gpu: Gpu) -> None:
    nvml.reasons = nvml.milliwatts = nvml.millijoules = nvml.celsius = nvml.held_ns = None
    said = gpu.read()
    assert (said.power_w, said.energy_j, said.temperature_c, said.reasons) == (None, None, None, ())
    assert said.sm_mhz == 1980
    assert gpu.busy(0.0) == set()
    assert said.held_s == {}
    nvml.held_ns = {0: 10**9, 1: 10**9}
    assert between([said, gpu.read()]) == ()  # what was not known before tells nothing


def test_no_card_and_no_driver(nvml: Nvml) -> None:
    assert Gpu.open(torch.device("cpu")) is None
    nvml.present = False
    assert Gpu.open(torch.device("cuda:0")) is None


def test_a_slice_of_a_card_is_not_read_and_the_record_says_so(
    nvml: Nvml, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, experiment: Callable[..., Experiment]
) -> None:
    monkeypatch.setattr(torch.cuda, "_get_nvml_device_index", NVML_INDEX)
    monkeypatch.setattr(torch.cuda, "_raw_device_uuid_nvml", lambda: ["GPU-1234"])
    for visible, unread in (("GPU-1234", False), ("MIG-5678", True)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        session = Session(experiment("workload=mlp"), "cuda:0", tmp_path, Stopwatch(), Progress())
        session.close()
        assert (session.machine.gpu is None) is unread
        assert any("no readings of clocks" in note for note in session.result.notes) is unread


def test_the_card_is_part_of_the_environment(nvml: Nvml) -> None:
    facts = describe(torch.device("cuda:0"))
    assert (facts["gpu"], facts["gpu_uuid"], facts["driver"]) == ("Example GPU", "GPU-1234", "580.1")
    assert (facts["power_limit_w"], facts["max_sm_clock_mhz"], facts["ecc"], facts["mig"]) == (700.0, 1980, True, None)
    nvml.present = False
    assert describe(torch.device("cuda:0"))["nvml"] == "does not answer"
    assert "gpu" not in describe(torch.device("cpu"))
