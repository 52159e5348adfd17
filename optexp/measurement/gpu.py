"""The GPU's own instruments, read through NVML. Only the parent reads them, and only between timed blocks."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from optexp.measurement.clock import now

UNREAD = (
    "the GPU's own instruments cannot be read (NVML does not answer, or this is a MIG slice): no readings of clocks,"
    " throttling, power, energy, free memory and other programs on it"
)
POWER_CAP, THERMAL = "power cap", "thermal slow-down"
BRIEF = 0.01  # share of the time for which clocks may be held down before it counts
REASONS = {  # NVML's bits for clocks below their maximum, without idleness and an administrator's settings
    0x04: POWER_CAP,
    0x08: "hardware slow-down",
    0x20: THERMAL,
    0x40: "thermal slow-down by hardware",
    0x80: "power brake",
}


@dataclass(frozen=True)
class Reading:
    """State of the card at one moment; None for facts that this card does not report.

    at_s:     moment, by `clock.now`
    energy_j: since the driver was loaded
    reasons:  why clocks are below their maximum
    held_s:   seconds for which clocks were held down since the driver was loaded, by reason
    """

    at_s: float
    sm_mhz: float | None = None
    memory_mhz: float | None = None
    power_w: float | None = None
    temperature_c: float | None = None
    energy_j: float | None = None
    reasons: tuple[str, ...] = ()
    held_s: Mapping[str, float] = field(default_factory=dict)

    @property
    def slowed(self) -> tuple[str, ...]:
        return slowing(self.reasons)


def slowing(reasons: Iterable[str]) -> tuple[str, ...]:
    """The reasons that invalidate a time. The power cap does not: under this load the card always reaches it."""
    return tuple(reason for reason in reasons if reason != POWER_CAP)


def between(readings: Sequence[Reading]) -> tuple[str, ...]:
    """Reasons for low clocks, at the readings or between the first and the last: a card may idle when it is read."""
    found = [reason for reading in readings for reason in reading.reasons]
    if readings:
        first, last = readings[0], readings[-1]
        brief = BRIEF * (last.at_s - first.at_s)
        found += [name for name, held in last.held_s.items() if held - first.held_s.get(name, held) > brief]
    return tuple(dict.fromkeys(found))


class Gpu:
    """One card. An unsupported query gives None, never an error."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml, self.handle = nvml, handle

    @classmethod
    def open(cls, device: torch.device) -> Gpu | None:
        """The card that arms call `device`; None on a CPU, for a MIG slice, and where there is no NVML."""
        if device.type != "cuda":
            return None
        try:
            import pynvml
        except ImportError:
            return None
        try:
            pynvml.nvmlInit()
            # CUDA_VISIBLE_DEVICES may hide cards, so the indices differ. Arms number cards by bus, as NVML does.
            return cls(pynvml, pynvml.nvmlDeviceGetHandleByIndex(torch.cuda._get_nvml_device_index(device)))
        except (pynvml.NVMLError, RuntimeError):  # RuntimeError: torch does not see the device
            return None

    def ask(self, function: str, *arguments: Any) -> Any:
        """An NVML query about this card; None where it has no answer."""
        try:
            return getattr(self.nvml, function)(self.handle, *arguments)
        except self.nvml.NVMLError:
            return None

    def read(self) -> Reading:
        """The card's state now."""
        bits = self.ask("nvmlDeviceGetCurrentClocksThrottleReasons") or 0
        policies = {POWER_CAP: self.nvml.NVML_PERF_POLICY_POWER, THERMAL: self.nvml.NVML_PERF_POLICY_THERMAL}
        held = {name: self.ask("nvmlDeviceGetViolationStatus", policy) for name, policy in policies.items()}
        return Reading(
            at_s=now(),
            sm_mhz=self.ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_SM),
            memory_mhz=self.ask("nvmlDeviceGetClockInfo", self.nvml.NVML_CLOCK_MEM),
            power_w=_scaled(self.ask("nvmlDeviceGetPowerUsage"), 1e-3),
            temperature_c=self.ask("nvmlDeviceGetTemperature", self.nvml.NVML_TEMPERATURE_GPU),
            energy_j=_scaled(self.ask("nvmlDeviceGetTotalEnergyConsumption"), 1e-3),
            reasons=tuple(name for bit, name in REASONS.items() if bits & bit),
            held_s={name: status.violationTime / 1e9 for name, status in held.items() if status is not None},
        )

    def utilisation(self) -> list[float]:
        """The share of the last period (about 0.2 s) in which the card computed; empty where it is not reported."""
        rates = self.ask("nvmlDeviceGetUtilizationRates")
        return [] if rates is None else [rates.gpu / 100]

    def until_idle(self, within_s: float = 10.0) -> None:
        """Wait until the card has computed nothing for a period (about 0.2 s); at most `within_s`."""
        end = now() + within_s
        while any(self.utilisation()) and now() < end:
            time.sleep(0.02)

    def lock_command(self, mhz: float) -> str:
        """The commands by which an administrator locks and resets the clocks."""
        card = self.ask("nvmlDeviceGetUUID")
        return f"sudo nvidia-smi --id={card} --lock-gpu-clocks={mhz:.0f},{mhz:.0f} (and --reset-gpu-clocks afterwards)"

    def newest_cuda(self) -> int | None:
        """The newest CUDA version that the driver supports, such as 13000 for 13.0; None where it is not reported."""
        try:
            return int(self.nvml.nvmlSystemGetCudaDriverVersion())
        except (self.nvml.NVMLError, AttributeError):
            return None

    def free_mib(self) -> float | None:
        memory = self.ask("nvmlDeviceGetMemoryInfo")
        return None if memory is None else memory.free / 2**20

    def processes(self) -> dict[int, int | None]:
        """Bytes on the card by process id, as the driver numbers processes."""
        running = self.ask("nvmlDeviceGetComputeRunningProcesses") or []
        return {process.pid: process.usedGpuMemory for process in running}

    def busy(self, since_s: float) -> set[int]:
        """Processes that computed after a moment of Unix time; empty where the card does not report it."""
        samples = self.ask("nvmlDeviceGetProcessUtilization", int(since_s * 1e6)) or []
        return {sample.pid for sample in samples if sample.smUtil}


Read = Callable[[], Reading | None]


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor
