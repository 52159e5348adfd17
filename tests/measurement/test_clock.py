"""The clock against the operating system's sleep, and its use in blocks and warm-up."""

import gc
import sys
import time
from collections.abc import Callable
from statistics import median
from subprocess import PIPE, Popen

import pytest
import torch

from optexp.measurement import clock

CPU = torch.device("cpu")


def test_a_sleep_measures_as_long_as_it_is() -> None:
    taken = []

    def sleep() -> None:
        start = time.monotonic()
        time.sleep(0.05)
        taken.append(time.monotonic() - start)  # a busy machine wakes a sleeper late

    timing = clock.time_block(sleep, 3, CPU)
    assert timing.wall_s == pytest.approx(sum(taken) / 3, rel=0.01)
    assert timing.wall_s >= 0.05
    assert timing.device_s is None


def test_patching_the_standard_clock_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "perf_counter", lambda: 0.0)
    assert clock.time_block(lambda: time.sleep(0.01), 1, CPU).wall_s > 0.009


class NoEvent:
    """Stands for torch.cuda.Event where there is no GPU."""

    def __init__(self, enable_timing: bool) -> None:
        self.at_s = 0.0


@pytest.mark.parametrize("on", [True, False])
def test_garbage_is_not_collected_while_a_block_is_timed(on: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_Event", NoEvent)
    monkeypatch.setattr(clock, "_record", lambda event: None)
    monkeypatch.setattr(clock, "_elapsed_ms", lambda first, last: 1.0)
    seen: list[bool] = []

    def run() -> None:
        seen.append(gc.isenabled())

    def broken() -> None:
        raise RuntimeError

    was = gc.isenabled()
    try:
        gc.enable() if on else gc.disable()
        clock.time_block(run, 3, CPU)
        clock.time_cold_block(run, 3, CPU, flush=run)
        with pytest.raises(RuntimeError):
            clock.time_cold_block(broken, 3, CPU, flush=run)
        assert gc.isenabled() is on
    finally:
        gc.enable() if was else gc.disable()
    assert len(seen) == 10
    assert not any(seen)


def test_a_cold_block_lets_the_host_get_ahead_and_keeps_its_last_result(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(clock, "_Event", NoEvent)
    monkeypatch.setattr(clock, "_record", lambda event: done.append("event"))
    monkeypatch.setattr(clock, "_elapsed_ms", lambda first, last: 1.0)
    monkeypatch.setattr(clock, "_rest", lambda cycles: rests.append(cycles) or done.append("rest"))
    rests, results = list[int](), iter(["first", "second", "third"])

    def run() -> str:
        time.sleep(0.0005)
        done.append("step")
        return next(results)

    clock.time_cold_block(run, 3, CPU, lambda: done.append("flush"), keep=done.append)
    assert done == ["rest", "flush", "event", "step", "event"] * 3 + ["third"]
    assert rests[0] == 0
    assert 0.0005 * clock.CYCLES <= rests[1] == rests[2] <= clock.MOST_REST_S * clock.CYCLES


def test_a_device_s_steps_come_behind_one_that_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(clock, "_Event", NoEvent)
    monkeypatch.setattr(clock, "_record", lambda event: done.append("event"))
    monkeypatch.setattr(clock, "_elapsed_ms", lambda first, last: 6.0)
    monkeypatch.setattr(clock, "synchronize", lambda device: done.append("wait"))
    step_s = clock.device_step_s(lambda: done.append("step"), 3, torch.device("cuda"))
    assert done == ["wait", "step", "event", "step", "step", "step", "event", "wait"]
    assert step_s == pytest.approx(2e-3)


def test_a_cpu_s_step_takes_wall_time() -> None:
    assert clock.device_step_s(lambda: time.sleep(0.01), 2, CPU) > 0.009


def test_warm_up_outlasts_a_slow_start() -> None:
    calls = iter([0.02] * 10 + [0.002] * 10_000)
    steady = clock.warm_up(lambda: time.sleep(next(calls)), CPU, limit_s=3.0)
    assert median(steady) < 0.004


def scripted(monkeypatch: pytest.MonkeyPatch, step_s: Callable[[int], float]) -> list[float]:
    """Steps that take what a function of their number says, by a clock that nothing else moves."""
    taken: list[float] = []

    def time_block(run: object, steps: int, device: torch.device) -> clock.Timing:
        taken.append(step_s(len(taken)))
        return clock.Timing(1, taken[-1], None)

    monkeypatch.setattr(clock, "now", lambda: sum(taken))
    monkeypatch.setattr(clock, "time_block", time_block)
    return taken


def test_all_steady_steps_are_kept_and_the_first_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler may have worked in them: that is no 99th percentile."""
    taken = scripted(monkeypatch, lambda index: 1e-3 if index else 1.0)
    steady = clock.warm_up(lambda: None, CPU, limit_s=3.0)
    assert len(steady) >= 150
    assert max(steady) == 1e-3
    assert len(taken) - len(steady) == 20  # the first window


def test_where_the_limit_ends_a_window_the_one_before_it_counts_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps get faster and faster, and the third window has three of them."""
    scripted(monkeypatch, lambda index: 0.05 * 0.99**index)
    steady = clock.warm_up(lambda: None, CPU, limit_s=1.65)
    assert len(steady) > 23
    assert steady[0] == pytest.approx(0.05 * 0.99**20)


@pytest.mark.parametrize(("step_s", "least", "most"), [(8e-3, 55, 75), (0.05, 25, 26), (0.5, 3, 20)])
def test_some_more_single_steps_are_timed_where_that_is_cheap(
    step_s: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, lambda index: step_s)
    steady = clock.warm_up(lambda: None, CPU, limit_s=3.0)
    assert least <= len(steady) <= most


def test_warm_up_of_long_steps_ends() -> None:
    begin = clock.now()
    clock.warm_up(lambda: time.sleep(0.2), CPU, limit_s=0.5)
    assert clock.now() - begin < 2.0


@pytest.mark.skipif(sys.platform != "linux", reason="Linux tells which processes descend from which")
def test_what_processes_work_that_another_one_has_started() -> None:
    busy = "import time; end = time.process_time() + 0.1\nwhile time.process_time() < end: pass\n"
    start = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}]); sys.stdin.read()"
    with Popen([sys.executable, "-c", start], stdin=PIPE) as process:
        deadline = time.monotonic() + 60
        while clock.helped_s(process.pid) < 0.1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert 0.1 <= clock.helped_s(process.pid) < 1  # as long as it runs, and once it has been waited for
        process.communicate()
    assert clock.helped_s(process.pid) == 0.0
