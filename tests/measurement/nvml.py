"""A card to order, at the NVML boundary: it takes the place of the module `pynvml`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class NVMLError(Exception):
    pass


class Nvml:
    """Answers what the fields say; a None is not supported."""

    NVMLError = NVMLError
    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
    NVML_PERF_POLICY_POWER, NVML_PERF_POLICY_THERMAL = 0, 1

    def __init__(self) -> None:
        self.reasons: int | None = 0
        self.clocks: dict[int, int] = {1: 1980, 2: 2619}
        self.milliwatts: int | None = 350_000
        self.millijoules: int | None = 1_000_000
        self.celsius: int | None = 45
        self.running: dict[int, int | None] = {}
        self.utilisation: dict[int, int] = {}
        self.max_clock = 1980
        self.present = True
        self.held_ns: dict[int, int] | None = {0: 0, 1: 0}  # by policy
        self.free = 100 * 2**30

    def nvmlInit(self) -> None:  # noqa: N802
        if not self.present:
            raise NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        return index

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, handle: int) -> int:  # noqa: N802
        return self._told(self.reasons)

    def nvmlDeviceGetViolationStatus(self, handle: int, policy: int) -> Any:  # noqa: N802
        return SimpleNamespace(referenceTime=0, violationTime=self._told(self.held_ns)[policy])

    def nvmlDeviceGetClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return self.clocks[kind]

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return self._told(self.milliwatts)

    def nvmlDeviceGetTotalEnergyConsumption(self, handle: int) -> int:  # noqa: N802
        return self._told(self.millijoules)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        return self._told(self.celsius)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[Any]:  # noqa: N802
        return [SimpleNamespace(pid=pid, usedGpuMemory=size) for pid, size in self.running.items()]

    def nvmlDeviceGetProcessUtilization(self, handle: int, since_us: int) -> list[Any]:  # noqa: N802
        if not self.utilisation:
            raise NVMLError("Not Found")
        return [SimpleNamespace(pid=pid, smUtil=share) for pid, share in self.utilisation.items()]

    def nvmlDeviceGetName(self, handle: int) -> str:  # noqa: N802
        return "Example GPU"

    def nvmlSystemGetDriverVersion(self) -> str:  # noqa: N802
        return "580.1"

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> tuple[int, int]:  # noqa: N802
        return 9, 0

    def nvmlDeviceGetPowerManagementLimit(self, handle: int) -> int:  # noqa: N802
        return 700_000

    def nvmlDeviceGetEccMode(self, handle: int) -> list[int]:  # noqa: N802
        return [1, 1]

    def nvmlDeviceGetMaxClockInfo(self, handle: int, kind: int) -> int:  # noqa: N802
        return self.max_clock

    def nvmlDeviceGetMigMode(self, handle: int) -> list[int]:  # noqa: N802
        raise NVMLError("Not Supported")

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return "GPU-1234"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(free=self.free)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:  # noqa: N802
        return SimpleNamespace(gpu=97)

    @staticmethod
    def _told(value: Any) -> Any:
        if value is None:
            raise NVMLError("Not Supported")
        return value
