"""Which cores the arms run on. Arms run one at a time, so both are bound to the same ones."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from optexp.errors import ConfigError

LOOK_S = 0.1
QUIET = 0.2  # share of that time: two ticks of ten
CLAIM = "\0optexp core {}"


def choose(setting: str, device_type: str) -> list[int]:
    """The cores that `measurement.cpus` means here.

    auto is one core for GPU work, where it makes host-bound steps faster and steadier, and all cores for CPU work. That
    one is nobody else's: two comparisons on two GPUs of one host would otherwise slow each other's dispatching.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if setting == "all" or (setting == "auto" and device_type == "cpu"):
        return allowed
    if setting == "auto":
        return [_of_ones_own(allowed[::-1])]  # the first cores serve most interrupts
    try:
        cores = sorted({int(word) for word in setting.split(",")})
    except ValueError:
        raise ConfigError(f"measurement.cpus={setting}: allowed are auto, all, or core numbers such as 2,3") from None
    if outside := set(cores) - set(allowed):
        raise ConfigError(f"measurement.cpus={setting}: cores {sorted(outside)} are not among {allowed}")
    return cores


def _of_ones_own(cores: Sequence[int]) -> int:
    """The first that no other comparison has claimed and nobody works on now; without one, the quietest.

    A claim is a name in Linux's abstract namespace of sockets: it ends with this process, which keeps it from one
    comparison to the next.
    """
    if not _claims.keys() & set(cores):
        busy = _busy()
        for core in sorted(cores, key=lambda core: busy.get(core, 0.0) > QUIET):  # stable
            claim = socket.socket(socket.AF_UNIX)
            try:
                claim.bind(CLAIM.format(core))
            except OSError:
                claim.close()
                continue
            _claims[core] = claim
            break
        else:
            return min(cores, key=lambda core: busy.get(core, 0.0))
    return next(core for core in cores if core in _claims)


def _busy() -> dict[int, float]:
    """For how much of a tenth of a second each core worked; empty where the system does not tell."""
    before = _ticks()
    time.sleep(LOOK_S)
    after = _ticks()
    return {
        core: 1 - (idle - before[core][0]) / (every - before[core][1])
        for core, (idle, every) in after.items()
        if core in before and every > before[core][1]
    }


def _ticks() -> dict[int, tuple[int, int]]:
    """By core: ticks without work, and all of them (https://docs.kernel.org/filesystems/proc.html)."""
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        found = {words[0][3:]: [int(word) for word in words[1:9]] for words in lines if words[0][:3] == "cpu"}
        return {int(core): (ticks[3] + ticks[4], sum(ticks)) for core, ticks in found.items() if core}
    return {}


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
_claims: dict[int, socket.socket] = {}


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
