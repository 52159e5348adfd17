"""The cores that arms run on. Arms run one at a time, so both are bound to the same cores."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from optexp.errors import ConfigError

LOOK_S = 0.1
QUIET = 0.2  # share of LOOK_S (two ticks of ten): a core that works more is busy
CLAIM = "\0optexp core {}"


def choose(setting: str, device_type: str) -> list[int]:
    """The cores of a value of `measurement.cpus` on this machine.

    auto: all cores for CPU work. For GPU work one core, which makes host-bound steps faster and steadier. No other
    comparison uses that core: comparisons on two GPUs of one host would slow each other's dispatching.

    Raises:
        ConfigError: The setting is no list of this process's cores.
    """
    allowed = sorted(os.sched_getaffinity(0))
    if setting == "all" or (setting == "auto" and device_type == "cpu"):
        return allowed
    if setting == "auto":
        return [_claimed_core(allowed[::-1])]  # the first cores serve most interrupts
    try:
        cores = sorted({int(word) for word in setting.split(",")})
    except ValueError:
        raise ConfigError(f"measurement.cpus={setting}: allowed are auto, all, or core numbers such as 2,3") from None
    if outside := set(cores) - set(allowed):
        raise ConfigError(f"measurement.cpus={setting}: cores {sorted(outside)} are not among {allowed}")
    return cores


def _claimed_core(cores: Sequence[int]) -> int:
    """The first core without another comparison's claim, idle cores first; the quietest core if all are claimed.

    A claim is a name in Linux's abstract namespace of sockets. This process keeps its claim from one comparison to the
    next; the claim ends with the process.
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
    """The share of LOOK_S in which each core worked; empty where the system does not report it."""
    before = _ticks()
    time.sleep(LOOK_S)
    after = _ticks()
    return {
        core: 1 - (idle - before[core][0]) / (total - before[core][1])
        for core, (idle, total) in after.items()
        if core in before and total > before[core][1]
    }


def _ticks() -> dict[int, tuple[int, int]]:
    """Idle ticks and all ticks by core (https://docs.kernel.org/filesystems/proc.html)."""
    with suppress(OSError):
        lines = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        found = {words[0][3:]: [int(word) for word in words[1:9]] for words in lines if words[0][:3] == "cpu"}
        return {int(core): (ticks[3] + ticks[4], sum(ticks)) for core, ticks in found.items() if core}
    return {}


def grant(cores: Sequence[int]) -> None:
    """Set the cores that this process is bound to once it is set up (empty: its binding does not change)."""
    _granted[:], _wanted[:] = cores, []


def granted() -> list[int]:
    """The cores that this process may use once it is set up."""
    return list(_granted) or sorted(os.sched_getaffinity(0))


def narrow(cores: Sequence[int]) -> None:
    """Ask for fewer cores, on behalf of an optimized program."""
    _wanted[:] = cores
    spare_threads()


def spare_threads() -> None:
    """Limit torch's threads to the cores: more threads wait for each other, and operations of µs take ms.

    Call it before anything is compiled: torch compiles again after the number of threads changes.
    """
    if cores := _wanted or _granted:
        torch.set_num_threads(min(torch.get_num_threads(), len(cores)))


def settle() -> None:
    """Bind this process to the granted cores, or to those of them that `narrow` asked for."""
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
    """Keep the calling process off the arms' cores if other cores are left."""
    before = os.sched_getaffinity(0)
    others = before - set(cores)
    if others:
        bind_process(sorted(others))
    try:
        yield
    finally:
        if others:
            bind_process(sorted(before))


@dataclass(frozen=True)
class Standing:
    """A thread's settings in the kernel: its cores, its policy and its priority."""

    cores: frozenset[int]
    policy: int
    niceness: int


def standings(pid: int) -> dict[int, Standing]:
    """Of a process's threads, by id; empty where it has ended or the system does not tell."""
    found = {}
    with suppress(OSError):
        for task in map(int, os.listdir(f"/proc/{pid}/task")):
            with suppress(OSError):  # a thread may end
                cores, policy = frozenset(os.sched_getaffinity(task)), os.sched_getscheduler(task)
                found[task] = Standing(cores, policy, os.getpriority(os.PRIO_PROCESS, task))
    return found
