"""Energy is read from a meter that moves in jumps, while the arm certainly works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from optexp.comparison.under_load import under_load
from optexp.measurement import gpu as instruments
from optexp.measurement.gpu import Gpu, Reading
from optexp.measurement.load import power
from optexp.workers.arm import Arm
from optexp.workers.client import Client, Pending
from tests.measurement.nvml import Nvml


class Worker(Client[Arm]):
    """Counts what it is asked to do."""

    name = "worker"

    def __init__(self) -> None:
        self.asked: dict[str, Any] = {}
        self.waited = False

    def start(self, method: Callable[..., Any], *args: Any, **arguments: Any) -> Pending[Any]:
        self.asked = arguments
        return Pending(self.done)

    def done(self) -> float:
        self.waited = True
        return 1.1e-3

    def close(self) -> None: ...


def test_watts_come_from_the_meter(gpu: Gpu, nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    time = [100.0]
    monkeypatch.setattr(instruments, "now", lambda: time[0])

    def sleep(seconds: float) -> None:
        time[0] += seconds + 0.001
        nvml.millijoules = round(400_000 * (time[0] // 0.04 * 0.04))  # 400 W, told every 40 ms

    worker = Worker()
    load = under_load(worker, gpu, step_s=1e-3, seconds=1.0, sleep=sleep)
    assert load.power_w == pytest.approx(400, rel=0.01)
    assert (load.utilisation, load.step_s) == (0.97, 1.1e-3)
    assert worker.asked == {"steps": 1100}
    assert worker.waited
    assert time[0] < 100 + 0.1 + 1.0  # nothing was read after the work


def test_a_meter_that_hardly_moves_tells_nothing() -> None:
    assert power([Reading(t / 10, energy_j=float(t > 5)) for t in range(10)]) is None
    assert power([Reading(t / 10) for t in range(10)]) is None
