"""The only clock. Its functions are bound when this module is imported, before any strategy's code is, so that
a strategy that patches `perf_counter` or `synchronize` does not change what is read here."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from time import perf_counter

import torch

now = perf_counter
_cuda_synchronize = torch.cuda.synchronize
_Event = torch.cuda.Event
_elapsed_ms = torch.cuda.Event.elapsed_time


@dataclass(frozen=True)
class Timing:
    """One block: steps run, host wall seconds a step, device seconds a step (between events; None on a CPU)."""

    steps: int
    wall_s: float
    device_s: float | None


def synchronize(device: torch.device) -> None:
    """Wait for everything the device was asked to do, on all streams."""
    if device.type == "cuda":
        _cuda_synchronize(device)


def time_block(run: Callable[[], object], steps: int, device: torch.device) -> Timing:
    """Wall time of `steps` calls with a device-wide synchronise at both ends; garbage collection waits outside."""
    on_gpu = device.type == "cuda"
    first, last = (_Event(enable_timing=True), _Event(enable_timing=True)) if on_gpu else (None, None)
    collecting = gc.isenabled()
    gc.disable()
    try:
        synchronize(device)
        start = now()
        if first is not None:
            first.record()
        for _ in range(steps):
            run()
        if last is not None:
            last.record()
        synchronize(device)
        wall = now() - start
    finally:
        if collecting:
            gc.enable()
    device_s = None if first is None or last is None else _elapsed_ms(first, last) / 1e3 / steps
    return Timing(steps, wall / steps, device_s)


def empty_timer_s(device: torch.device) -> float:
    """What timing nothing costs: the resolution that a block must dwarf."""
    return median(time_block(lambda: None, 1, device).wall_s for _ in range(20))


def warm_up(run: Callable[[], object], device: torch.device, limit_s: float) -> float:
    """Run until the medians of two successive windows differ by at most 2 %, or `limit_s` has passed.

    A window is 20 steps and at least 0.25 s; a step so long that 20 do not fit counts as its own window.
    Returns the last window's median seconds a step.
    """
    begin = now()

    def window() -> float:
        samples: list[float] = []
        start = now()
        while len(samples) < 20 or now() - start < 0.25:
            samples.append(time_block(run, 1, device).wall_s)
            if len(samples) >= 3 and now() - begin > limit_s:
                break
        return median(samples)

    current = window()
    while now() - begin < limit_s:
        previous, current = current, window()
        if abs(current - previous) <= 0.02 * previous:
            break
    return current
