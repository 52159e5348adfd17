"""One comparison at a time on each card, and no lock outlives its process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from optexp.comparison import gpu_lock
from optexp.comparison.gpu_lock import Card, locked

HOLD = """
import sys, time
from pathlib import Path
from optexp.comparison import gpu_lock
gpu_lock.FOLDER = Path(sys.argv[1])
held = gpu_lock.acquire(sys.argv[2])
print(held is not None, flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def _two_cards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_lock, "FOLDER", tmp_path)
    monkeypatch.setattr(gpu_lock, "POLL_S", 0.01)
    devices = {"auto": ["cuda:0", "cuda:1"]}
    monkeypatch.setattr(gpu_lock, "candidates", lambda setting: devices.get(setting, [setting]))
    monkeypatch.setattr(
        gpu_lock, "describe", lambda device: None if device == "cpu" else Card(device, f"GPU-{device[-1]}", "H100")
    )


class Waits:
    """Counts who waits; the first look frees the card."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    @contextmanager
    def __call__(self, reason: str) -> Iterator[None]:
        self.reasons.append(reason)
        self.release()
        yield

    def release(self) -> None:
        """Nothing is held."""


def test_auto_takes_a_card_that_is_free() -> None:
    waits = Waits()
    with locked("auto", waits) as first, locked("auto", waits) as second:
        assert (first, second) == ("cuda:0", "cuda:1")
    with locked("auto", waits) as again:
        assert again == "cuda:0"
    assert waits.reasons == []


def test_a_card_that_is_taken_is_waited_for(tmp_path: Path) -> None:
    held = gpu_lock.acquire("GPU-0")
    waits = Waits()
    waits.release = lambda: os.close(held)
    with locked("cuda:0", waits) as device:
        assert device == "cuda:0"
        assert gpu_lock.acquire("GPU-0") is None
    assert waits.reasons == ["another optexp process uses cuda:0"]


def test_who_accepts_other_programs_waits_for_none() -> None:
    with locked("cuda:0", Waits()), locked("cuda:0", None) as device:
        assert device == "cuda:0"
    os.close(gpu_lock.acquire("GPU-0"))


def test_a_cpu_has_no_lock(tmp_path: Path) -> None:
    with locked("cpu", Waits()) as device, locked("cpu", Waits()):
        assert device == "cpu"
    assert list(tmp_path.iterdir()) == []


def test_a_lock_ends_with_its_process_and_binds_other_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD, str(tmp_path), "GPU-0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "True\n"
        assert gpu_lock.acquire("GPU-0") is None
        other.send_signal(signal.SIGKILL)
        other.wait()
    os.close(gpu_lock.acquire("GPU-0"))


def test_every_user_may_use_the_file(tmp_path: Path) -> None:
    os.close(gpu_lock.acquire("GPU-0"))
    assert (tmp_path / "optexp-GPU-0.lock").stat().st_mode & 0o777 == 0o666


def test_a_suite_shares_a_card_and_waits_for_others() -> None:
    waits = Waits()
    with locked("cuda:0", waits, shared=True), locked("cuda:0", waits, shared=True):
        assert gpu_lock.acquire("GPU-0") is None
    held = gpu_lock.acquire("GPU-0")
    waits.release = lambda: os.close(held)
    with locked("cuda:0", waits, shared=True):
        assert len(waits.reasons) == 1
