"""What a card says arrives in the units people use, and what it does not say is None."""

from __future__ import annotations

import pytest
import torch

from optexp.measurement.environment import describe
from optexp.measurement.gpu import Gpu
from tests.measurement.nvml import Nvml


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


@pytest.mark.parametrize(("bit", "slowed"), [(0x08, True), (0x40, True), (0x80, True), (0x04, False), (0x02, False)])
def test_what_counts_as_slowed(nvml: Nvml, gpu: Gpu, bit: int, slowed: bool) -> None:
    nvml.reasons = bit
    assert bool(gpu.read().slowed) is slowed


def test_a_card_that_tells_little(nvml: Nvml, gpu: Gpu) -> None:
    nvml.reasons = nvml.milliwatts = nvml.millijoules = nvml.celsius = None
    said = gpu.read()
    assert (said.power_w, said.energy_j, said.temperature_c, said.reasons) == (None, None, None, ())
    assert said.sm_mhz == 1980
    assert gpu.busy(0.0) == set()


def test_no_card_and_no_driver(nvml: Nvml) -> None:
    assert Gpu.open(torch.device("cpu")) is None
    nvml.present = False
    assert Gpu.open(torch.device("cuda:0")) is None


def test_the_card_is_part_of_the_environment(nvml: Nvml) -> None:
    facts = describe(torch.device("cuda:0"))
    assert (facts["gpu"], facts["gpu_uuid"], facts["driver"]) == ("Example GPU", "GPU-1234", "580.1")
    assert (facts["power_limit_w"], facts["max_sm_clock_mhz"], facts["ecc"], facts["mig"]) == (700.0, 1980, True, None)
    nvml.present = False
    assert describe(torch.device("cuda:0"))["nvml"] == "does not answer"
    assert "gpu" not in describe(torch.device("cpu"))
