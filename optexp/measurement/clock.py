"""The clock: the only module that reads time for step times.

Its functions are bound when this module is imported, before any strategy's code: a strategy that patches `perf_counter`
or `synchronize` does not change the times read here.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import torch

from optexp.support.descent import descendants

now = perf_counter
on_core = thread_time  # of this thread
# The C function behind torch.cuda.synchronize. A build without CUDA has none.
_cuda_synchronize: Callable[[], None] = getattr(torch._C, "_cuda_synchronize", lambda: None)
_Event = torch.cuda.Event
_record, _elapsed_ms = torch.cuda.Event.record, torch.cuda.Event.elapsed_time
_rest: Callable[[int], None] = getattr(torch._C, "_cuda_sleep", lambda cycles: None)  # below torch.cuda._sleep

CYCLES = 2e9  # most cycles of an SM in a second
MOST_REST_S = 1e-3
_TICKS = os.sysconf("SC_CLK_TCK")
WINDOW_S = 0.15  # of a warm-up
SINGLES, SINGLES_S = 100, 0.3  # single steps (5 lie beyond the 95th percentile), and most seconds to time them

_HANDS: list[tuple[Any, str]] = [
    *((time, name) for name in ("perf_counter", "perf_counter_ns", "monotonic", "monotonic_ns", "time", "time_ns")),
    (torch.cuda, "synchronize"),
    (torch._C, "_cuda_synchronize"),
    (torch.cuda, "Event"),
    *((torch.cuda.Event, name) for name in ("record", "elapsed_time", "synchronize", "query")),
    (torch.cuda.Stream, "synchronize"),
]


@dataclass(frozen=True)
class Timing:
    """One block.

    wall_s:   host seconds per step
    device_s: device seconds per step, between events; None on a CPU
    start_s:  start of the block by `now`, which all processes of a machine share
    cold:     the L2 cache was emptied before every step: only `device_s` then excludes the flush
    skipped:  a GradScaler left a step out
    aside_s:  seconds that the caller waited for the block beyond its steps, by the caller's clock
    queued:   share of the block for which the arm had no core (`share_taken`); None where the system has no such figure
    helped_s: CPU seconds per step of processes that the arm has started
    paused:   how often the arm was stopped by a signal meanwhile
    """

    steps: int
    wall_s: float
    device_s: float | None
    start_s: float = 0.0
    cold: bool = False
    skipped: bool = False
    aside_s: float = 0.0
    queued: float | None = None
    helped_s: float = 0.0
    paused: int = 0

    @property
    def step_s(self) -> float:
        """Seconds per step that verdicts use: device time for cold blocks, else wall time."""
        return self.device_s if self.cold and self.device_s is not None else self.wall_s

    def told_as(self, steps: int) -> Timing:
        """The same block reported as fewer steps, so that each step seems delayed (the known delay of the controls)."""
        more = self.steps / steps
        return replace(self, steps=steps, wall_s=self.wall_s * more, device_s=self.device_s and self.device_s * more)


def synchronize(device: torch.device) -> None:
    """Wait for all work of the device, on all streams."""
    if device.type == "cuda":
        with torch.cuda.device(device):
            _cuda_synchronize()


def worked_s(pid: int) -> float:
    """CPU seconds that all threads of another process have used so far; 0 where it has ended."""
    try:
        return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED of that process: Linux has a clock for each
    except OSError:
        return 0.0


def helped_s(pid: int) -> float:
    """CPU seconds of all descendants of a process so far, those that ended and were waited for included."""
    below = descendants(pid)
    return sum(map(worked_s, below)) + sum(map(_waited_for_s, (pid, *below)))


def _waited_for_s(pid: int) -> float:
    """CPU seconds of children that ended and were waited for."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[13]) + int(fields[14])) / _TICKS  # cutime, cstime


def account(pid: int) -> tuple[float, float] | None:
    """Seconds that a process's threads have run so far, and seconds that they were ready to run but had no core (sums).

    None where the system has no such figures (https://docs.kernel.org/scheduler/sched-stats.html) or the process ended.
    """
    try:
        accounts = [task.joinpath("schedstat").read_text().split() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return None
    ran, queued = (sum(int(numbers[field]) for numbers in accounts) / 1e9 for field in (0, 1))
    return ran, queued


def taken_by_others(before: tuple[float, float], after: tuple[float, float], core_s: float) -> float:
    """An upper bound of the seconds for which other processes kept a process off its cores, between two accounts.

    Its threads also wait for each other, as the caller of backward for autograd's thread. Such waits are not due to
    other processes, so core time that the process's own threads used is subtracted.

    core_s: seconds between the accounts times the number of the process's cores
    """
    ran, queued = (late - early for late, early in zip(after, before, strict=True))
    return max(0.0, min(queued, core_s - ran))


def share_taken(before: tuple[float, float], after: tuple[float, float], seconds: float, cores: int) -> float:
    """`taken_by_others` as a share from 0 to 1: of the elapsed time or, if larger, of the CPU time that threads wanted.

    So one waiting thread has the same weight on two cores as on sixty, and a thread that mostly sleeps has little.
    """
    taken = taken_by_others(before, after, seconds * cores)
    ran = max(0.0, after[0] - before[0])  # negative where a thread ended: its account ends with it
    return taken / max(seconds, ran + taken)


def until_at_rest(pid: int, within_s: float) -> None:
    """Wait until no thread of another process runs, at most `within_s`.

    OpenMP's threads spin for some milliseconds after their last work; on a shared core they can lengthen another arm's
    block of 20 ms by a third.
    """
    end = now() + within_s
    while _runs(pid) and now() < end:
        time.sleep(1e-3)


def _runs(pid: int) -> bool:
    """Whether a thread of a process is running; False where the process ended or the system does not show it."""
    try:
        stats = [task.joinpath("stat").read_text() for task in Path(f"/proc/{pid}/task").iterdir()]
    except OSError:
        return False
    return any(stat.rpartition(")")[2].split()[0] == "R" for stat in stats)


def tampered() -> list[str]:
    """Names of timing functions that were replaced since this module was imported."""
    return [
        f"{getattr(owner, '__name__', owner)}.{name}"
        for (owner, name), original in zip(_HANDS, _ORIGINAL, strict=True)
        if getattr(owner, name, None) is not original
    ]


@contextmanager
def _no_collection() -> Iterator[None]:
    """Defer garbage collection."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def time_block(
    run: Callable[[], object],
    steps: int,
    device: torch.device,
    keep: Callable[[Any], object] | None = None,
    last: Callable[[], object] | None = None,
) -> Timing:
    """Wall time of `steps` calls with a device-wide synchronise at both ends; garbage collection waits outside.

    keep: called with the result of the last step, as soon as the clock has stopped
    last: called in place of `run` in the last step
    """
    on_gpu, ending = device.type == "cuda", last or run
    first, end = (_Event(enable_timing=True), _Event(enable_timing=True)) if on_gpu else (None, None)
    with _no_collection():
        synchronize(device)
        start = now()
        if first is not None:
            _record(first)
        for _ in range(steps - 1):
            run()
        result = ending()
        if end is not None:
            _record(end)
        synchronize(device)
        wall = now() - start
        if keep is not None:
            keep(result)
    device_s = None if first is None or end is None else _elapsed_ms(first, end) / 1e3 / steps
    return Timing(steps, wall / steps, device_s, start)


def device_step_s(run: Callable[[], object], steps: int, device: torch.device) -> float:
    """Device seconds per step without the host's share; on a CPU, the wall time.

    An untimed step runs first, and the host launches the timed ones while it runs.
    """
    if device.type != "cuda":
        return time_block(run, steps, device).wall_s
    first, last = _Event(enable_timing=True), _Event(enable_timing=True)
    with _no_collection():
        synchronize(device)
        run()
        _record(first)
        for _ in range(steps):
            run()
        _record(last)
        synchronize(device)
    return float(_elapsed_ms(first, last)) / 1e3 / steps


def time_cold_block(
    run: Callable[[], object],
    steps: int,
    device: torch.device,
    flush: Callable[[], object],
    keep: Callable[[Any], object] | None = None,
    last: Callable[[], object] | None = None,
) -> Timing:
    """Like `time_block`, with `flush` before every step, outside of the events; the median of the steps counts.

    Before each flush the device sleeps for as long as the host needs to launch a step, so that it never waits for the
    host between a step's kernels.
    """
    events = [(_Event(enable_timing=True), _Event(enable_timing=True)) for _ in range(steps)]
    rest_s, result = 0.0, None
    with _no_collection():
        synchronize(device)
        start = now()
        for index, (first, end) in enumerate(events):
            step = last if last is not None and index == steps - 1 else run
            _rest(int(rest_s * CYCLES))
            flush()
            asked = now()
            _record(first)
            result = step()
            _record(end)
            if not index:  # later launches may wait for room in the queue
                rest_s = min(now() - asked, MOST_REST_S)
        synchronize(device)
        wall = now() - start
        if keep is not None:
            keep(result)
    return Timing(steps, wall / steps, median(_elapsed_ms(*pair) for pair in events) / 1e3, start, cold=True)


def empty_timer_s(device: torch.device) -> float:
    """Seconds that the timing of an empty step takes: a block must be many times longer."""
    return median(time_block(lambda: None, 1, device).wall_s for _ in range(20))


def warm_up(run: Callable[[], object], device: torch.device, limit_s: float) -> list[float]:
    """Run until a window's median is at most 2 % below that of the window before, or `limit_s` has passed.

    A window is 20 steps and at least `WINDOW_S`; a step so long that 20 do not fit is a window of its own. Steps that
    get slower are warm: caches and clocks make them faster, and what slows them meets the other arm's blocks, too.

    Returns:
        Seconds of single steps in the last two windows; the first window counts only if there is no other. If these
        steps are few, more are timed.
    """
    begin = now()

    def window() -> list[float]:
        samples: list[float] = []
        start = now()
        while len(samples) < 20 or now() - start < WINDOW_S:
            samples.append(time_block(run, 1, device).wall_s)
            if len(samples) >= 3 and now() - begin > limit_s:
                break
        return samples

    windows = [window()]
    while now() - begin < limit_s:
        windows.append(window())
        before, after = map(median, windows[-2:])
        if after >= 0.98 * before:
            break
    steady = [seconds for samples in (windows[1:] or windows)[-2:] for seconds in samples]
    end = now() + SINGLES_S - median(steady)
    while len(steady) < SINGLES and now() < end:
        steady.append(time_block(run, 1, device).wall_s)
    return steady


_HANDS += [  # this module's own functions
    (sys.modules[__name__], name) for name, value in list(globals().items()) if callable(value)
]
_ORIGINAL = [getattr(owner, name, None) for owner, name in _HANDS]
