"""What only a card can show: its instruments, its caches, another program on it, and our clock beside CUPTI's."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import pytest
import torch

from optexp.commands import audit
from optexp.measurement import clock
from optexp.measurement.gpu import Gpu, between
from optexp.measurement.neighbours import neighbours
from optexp.result import Result, Verdict
from tests.benchmarks.false_alarms import same_calls
from tests.reached import measured

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda:0")
SMALL_GELU = ["workload=gelu", "workload.size=1024", "workload.variant=functional", "strategy=baseline"]
BUSY = """
import torch
a = torch.randn(4096, 4096, device="cuda")
print("ready", flush=True)
while True:
    a = (a @ a).clamp_(-1, 1)
    torch.cuda.synchronize()
"""


def optexp(folder: Path, *arguments: str) -> Result:
    command = [sys.executable, "-m", "optexp", *arguments, f"hydra.run.dir={folder / 'job'}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=280)
    record = folder / "job" / "result.json"
    assert record.exists(), done.stdout + done.stderr
    assert audit.main([str(record)]) == 0
    return Result.read(record)


def test_a_reading_is_complete_and_quick() -> None:
    gpu = Gpu.open(CUDA)
    assert gpu is not None
    first = gpu.read()
    begin = time.perf_counter()
    readings = [gpu.read() for _ in range(20)]
    assert (time.perf_counter() - begin) / 20 < 0.02
    for said in readings:
        assert None not in (said.sm_mhz, said.memory_mhz, said.power_w, said.temperature_c, said.energy_j)
        assert said.at_s > first.at_s
        assert all(said.held_s[name] >= held for name, held in first.held_s.items())
        assert "thermal slow-down" not in between([first, said])
    assert gpu.utilisation()


def test_energy_cold_caches_and_controls_in_one_job(tmp_path: Path) -> None:
    quick = ["measurement=quick", "measurement.controls=true", "measurement.l2=both", "measurement.load_s=1"]
    result = optexp(tmp_path, *SMALL_GELU, *quick)
    assert result.verdict.measured, result.headline
    limit = result.environment["power_limit_w"]
    for arm in (result.baseline, result.candidate):
        assert arm.power_w is not None
        assert arm.energy_j is not None
        assert arm.step_us is not None
        assert 20 < arm.power_w < 1.1 * limit
        assert arm.load_us is not None
        assert 0.5 < arm.load_us / arm.step_us < 2
        assert arm.energy_j == pytest.approx(arm.power_w * arm.load_us / 1e6)

        assert arm.utilisation is not None
        assert 0 < arm.utilisation <= 1  # of a step that may wait for the host most of the time
        # 8 MiB in and out come from memory instead of from the cache.
        assert arm.cold_us is not None
        assert arm.busy_us is not None
        assert arm.cold_us > 1.1 * arm.busy_us
        assert arm.p5_us is not None
        assert arm.p99_us is not None
        assert arm.p5_us <= arm.alone_us <= arm.p99_us  # type: ignore[operator]
    controls = result.measurement.controls
    assert controls["A/A"].ok, controls
    assert controls["known delay"].ok, controls
    assert controls["known delay"].estimate == pytest.approx(1.05, abs=0.02)
    assert result.series[0]["sm_mhz"]


@pytest.fixture
def busy_neighbour() -> Iterator[int]:
    """Another program that computes on the same card."""
    process = subprocess.Popen([sys.executable, "-c", BUSY], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield process.pid
    process.kill()
    process.communicate()


def test_another_program_is_refused_or_where_its_id_is_hidden_told(busy_neighbour: int, tmp_path: Path) -> None:
    gpu = Gpu.open(CUDA)
    assert gpu is not None
    found, hidden = neighbours(gpu)
    assert found or hidden
    result = optexp(tmp_path, *SMALL_GELU, "measurement=quick")
    if found:
        assert result.verdict is Verdict.INVALID
        assert str(busy_neighbour) in result.headline
        (tmp_path / "again").mkdir()
        accepted = optexp(tmp_path / "again", *SMALL_GELU, "measurement=quick", "environment.allow_foreign=true")
        assert measured(accepted)
        assert any(str(busy_neighbour) in watch.text for watch in accepted.measurement.watchdogs)
    else:
        assert any("mean nothing here" in note for note in result.notes)


@pytest.mark.parametrize("name", ["gelu", "matmul"])
def test_our_device_time_agrees_with_cupti(name: str) -> None:
    """On the same calls, for the card's clocks move; at sizes beside which what is between two is nothing."""
    generator = torch.Generator(CUDA).manual_seed(0)
    x = torch.randn(32768, 32768, device=CUDA, generator=generator)
    a = x[:8192, :8192].contiguous().bfloat16()
    work = {"gelu": lambda: torch.nn.functional.gelu(x, approximate="tanh"), "matmul": lambda: a @ a}[name]
    clock.warm_up(work, CUDA, 3.0)
    ours, cupti = (median(times) for times in zip(*(same_calls(work, 50, CUDA) for _ in range(9)), strict=True))
    assert ours == pytest.approx(cupti, rel=0.02)


def test_a_cold_block_times_the_step_alone() -> None:
    x = torch.randn(1024, 1024, device=CUDA)
    flush = torch.empty(2**28, dtype=torch.uint8, device=CUDA).zero_
    timing = clock.time_cold_block(lambda: torch.nn.functional.gelu(x), 50, CUDA, flush)
    assert timing.cold
    assert timing.device_s is not None
    assert timing.device_s < 0.5 * timing.wall_s  # of which writing 256 MiB is the most
    assert timing.step_s == timing.device_s


def test_a_device_s_step_does_not_wait_for_the_host() -> None:
    """Which takes 2 ms to ask for it, while the GPU is busy for ten with the one before."""

    def work() -> None:
        time.sleep(2e-3)
        torch.cuda._sleep(20_000_000)

    alone = clock.device_step_s(partial(torch.cuda._sleep, 20_000_000), 1, CUDA)
    assert clock.device_step_s(work, 1, CUDA) < 1.05 * alone


def test_a_cold_step_does_not_wait_for_the_host() -> None:
    """20 kernels take the host longer to ask for than emptying the cache takes, and the GPU hardly any time."""
    x = torch.randn(1024, device=CUDA)
    flush = torch.empty(2**26, dtype=torch.uint8, device=CUDA).zero_

    def work() -> None:
        y = x
        for _ in range(20):
            y = y + 1

    clock.warm_up(work, CUDA, 2.0)
    cold = median(clock.time_cold_block(work, 99, CUDA, flush).device_s or 0.0 for _ in range(5))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    captured = median(clock.time_cold_block(graph.replay, 99, CUDA, flush).device_s or 0.0 for _ in range(5))
    assert cold < 2 * captured
    host = median(clock.time_block(work, 99, CUDA).wall_s for _ in range(5))
    assert cold < 0.8 * host


def test_the_doctor_finds_the_card_and_trusts_it(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "optexp.doctor", "--quick"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert torch.cuda.get_device_name(0) in done.stdout, done.stdout + done.stderr
    assert "-gencode=arch=compute_" in done.stdout
    assert "✗ against itself" not in done.stdout, done.stdout
    assert "✗ known delay" not in done.stdout, done.stdout
