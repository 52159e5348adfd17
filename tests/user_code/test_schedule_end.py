"""Arms take more steps than a script whose schedule ends: its last rates hold."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.optim.lr_scheduler import OneCycleLR

from optexp.workers.process import Launcher


class Trains:
    def rates(self, steps: int) -> list[tuple[float, float]]:
        """Learning rate and momentum of each step, of a schedule of four."""
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
        schedule = OneCycleLR(optimizer, 0.1, total_steps=4)
        found = []
        for _ in range(steps):
            optimizer.step()
            schedule.step()
            found.append((float(optimizer.param_groups[0]["lr"]), float(optimizer.param_groups[0]["momentum"])))
        return found


@pytest.mark.slow
def test_steps_after_the_end_of_a_schedule_keep_its_last_rates(tmp_path: Path) -> None:
    launcher = Launcher()
    try:
        worker = launcher.fork(Trains, "candidate", tmp_path / "worker.log", timeout_s=60)
        found = worker.call(Trains.rates, steps=9)
    finally:
        launcher.close()
    plain = Trains().rates(4)
    assert found == plain + 5 * plain[-1:]
    with pytest.raises(ValueError, match="total steps is 4"):
        Trains().rates(5)
