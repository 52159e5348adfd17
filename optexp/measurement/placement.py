"""Which cores the arms run on. Arms run one at a time, so both are bound to the same ones."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from optexp.config import ConfigError


def choose(setting: str, device_type: str) -> list[int]:
    """The cores that `measurement.cpus` means here.

    auto is one core for GPU work, where it makes host-bound steps faster and steadier, and all cores for CPU work.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if setting == "all" or (setting == "auto" and device_type == "cpu"):
        return allowed
    if setting == "auto":
        return allowed[-1:]  # the first cores serve most interrupts
    try:
        cores = sorted({int(word) for word in setting.split(",")})
    except ValueError:
        raise ConfigError(f"measurement.cpus={setting}: allowed are auto, all, or core numbers such as 2,3") from None
    if outside := set(cores) - set(allowed):
        raise ConfigError(f"measurement.cpus={setting}: cores {sorted(outside)} are not among {allowed}")
    return cores


def grant(cores: Sequence[int]) -> None:
    """Say which cores this process will be bound to once it is set up (none: it stays as it is)."""
    _granted[:], _wanted[:] = cores, []


def granted() -> list[int]:
    """The cores that this process may use once it is set up."""
    return list(_granted) or sorted(os.sched_getaffinity(0))


def narrow(cores: Sequence[int]) -> None:
    """Ask for fewer: what an optimized program does to itself."""
    _wanted[:] = cores
    spare_threads()


def spare_threads() -> None:
    """More threads of torch than cores would wait for each other: an operation of microseconds then takes milliseconds.

    Best before anything is compiled: torch compiles it again once their number is another one.
    """
    if cores := _wanted or _granted:
        torch.set_num_threads(min(torch.get_num_threads(), len(cores)))


def settle() -> None:
    """Bind this process to what was granted, or to the part of it that it asked for."""
    if cores := _wanted or _granted:
        bind_process(cores)
        spare_threads()


_granted: list[int] = []
_wanted: list[int] = []


def bind_process(cores: Sequence[int]) -> None:
    """Bind every thread of this process; threads made later inherit it."""
    for task in Path("/proc/self/task").iterdir():
        with suppress(ProcessLookupError):  # it ended meanwhile
            os.sched_setaffinity(int(task.name), cores)


@contextmanager
def keep_off(cores: Sequence[int]) -> Iterator[None]:
    """Keep the calling process off the arms' cores where others are left to it."""
    before = os.sched_getaffinity(0)
    others = before - set(cores)
    if others:
        bind_process(sorted(others))
    try:
        yield
    finally:
        if others:
            bind_process(sorted(before))
