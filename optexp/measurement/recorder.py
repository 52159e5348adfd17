"""ARM: a profiled pass over a few steady steps, written as a Chrome trace."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from math import ceil
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch.profiler import profile

STEP = "optexp.step"
TIMED = "optexp_step_us"  # metadata of the trace: µs a step took before tracing began

LONGEST_S = 3.0  # most time of the traced steps: of slow steps, fewer are traced
BRIEF_S = 0.15  # the same where a search looks at many stacks: to read a step of 10,000 operators takes longer
MOST_EVENTS = 100_000  # operators, calls, kernels, allocations of a trace: to read ten times as many takes minutes
DENSE_S = 0.02  # a shorter step has too few events to be counted
SHORT_S, TRIES = 0.1, 3  # traced CPU steps of less total time are traced 3 times, as an interruption would dominate one
RESERVED = 2**30  # bytes at most
STEADY_S, FEW = 0.02, 10  # unmarked CPU steps until threads are awake again: for so long, at most so many
WARMUP = 2  # steps that the profiler records and drops


def record(
    run: Callable[[], object],
    steps: int,
    path: Path,
    device: torch.device,
    warmup: int = WARMUP,
    exactly: bool = False,
    longest_s: float = LONGEST_S,
) -> None:
    """Profile calls of `run` and write a gzipped Chrome trace.

    The same steps are timed first, as tracing slows the host. Short steps on a CPU are traced three times, and the
    quickest trace is kept. In a first trace the profiler's records fragment the heap, so that tensors need new pages in
    each step; a later trace reuses these pages. Of steps with very many events, as of a recurrent network, fewer are
    traced. Nothing should be timed in this process afterwards.

    Args:
        run: One step.
        steps: Number of calls; fewer where they are slow.
        path: Of the trace, which ends in .gz.
        device: Of the step.
        warmup: Steps that the profiler records and drops.
        exactly: Trace `steps` steps, however slow they are.
        longest_s: Most time of the traced steps, which are at least two where `LONGEST_S` allows two.
    """
    from optexp.measurement import clock, heap

    first = clock.time_block(run, 1, device).wall_s
    least = min(2, max(1, round(LONGEST_S / first)))
    steps = steps if exactly else min(steps, max(least, round(longest_s / first)))
    if steps > 1 and first > DENSE_S and not exactly:
        steps = min(steps, max(1, MOST_EVENTS // max(1, _events(_traced(run, 1, device)[1]))))
    blocks = 3 if steps * first < LONGEST_S / 3 else 1
    timed = median(clock.time_block(run, steps, device).wall_s for _ in range(blocks))
    tries = TRIES if device.type == "cpu" and steps * first < SHORT_S else 1
    traced, most = [], 0
    for _ in range(tries):
        heap.reserve(min(2 * most, RESERVED))
        before = heap.given()
        traced.append(_traced(run, steps, device, timed, warmup))
        most = max(most, heap.given() - before)
    _, profiler = min(traced, key=itemgetter(0))
    export(profiler, path)


def record_once(run: Callable[[], object], path: Path, device: torch.device) -> None:
    """Write a trace of one step whose times do not matter: the step is neither timed nor repeated."""
    _, profiler = _traced(run, 1, device)
    export(profiler, path)


def _events(profiler: profile) -> int:
    """Number of events of a finished trace."""
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return len(results.events()) if results is not None else 0


def export(profiler: profile, path: Path) -> None:
    """Write a gzipped Chrome trace."""
    plain = path.with_suffix("")
    profiler.export_chrome_trace(str(plain))
    with plain.open("rb") as written, gzip.open(path, "wb", compresslevel=3) as packed:
        shutil.copyfileobj(written, packed, 2**20)  # torch itself packs line by line, which takes twenty times as long
    plain.unlink()


def _traced(
    run: Callable[[], object], steps: int, device: torch.device, timed: float | None = None, warmup: int = 1
) -> tuple[float, profile]:
    """Seconds of the traced steps, and the profiler with their trace.

    timed: seconds of a step before tracing began; None: no unmarked steps come first
    """
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    from optexp.measurement import clock

    on_gpu = device.type == "cuda"
    with profile(
        activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])],
        schedule=schedule(wait=0, warmup=1, active=1, repeat=1),
        record_shapes=True,
        profile_memory=not on_gpu,
    ) as profiler:
        for _ in range(warmup):
            run()
        profiler.step()  # once: its own cost between steps would look like the program's
        for _ in range(0 if not timed else 1 if on_gpu else min(FEW, ceil(STEADY_S / timed))):
            run()  # unmarked: the first steps that are traced are slow
        clock.synchronize(device)
        start = clock.now()
        for _ in range(steps):
            with record_function(STEP):
                run()
        clock.synchronize(device)  # inside the window, so that the last kernels are in the trace
        taken = clock.now() - start
        if timed:
            profiler.add_metadata_json(TIMED, json.dumps(timed * 1e6))
    return taken, profiler


def record_stacks(run: Callable[[], object], steps: int, path: Path, device: torch.device) -> None:
    """Profile calls of `run` with a range around each call of a Python function, and write a gzipped Chrome trace.

    The ranges take longer than most functions: shares of a step in this trace are meaningless.

    Args:
        run: One step.
        steps: Number of calls; fewer where they are slow.
        path: Of the trace, which ends in .gz.
        device: Of the step.
    """
    from torch.profiler import ProfilerActivity, profile, record_function

    from optexp.measurement import clock

    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    steps = max(1, min(steps, round(LONGEST_S / clock.time_block(run, 1, device).wall_s)))
    with profile(activities=activities, record_shapes=True, with_stack=True) as profiler:
        run()  # unmarked: the first step that is traced is slow
        clock.synchronize(device)
        for _ in range(steps):
            with record_function(STEP):
                run()
        clock.synchronize(device)
    export(profiler, path)
