"""How a comparison fits into a device's memory: distinct batches, arms side by side or in turns, where fp64 runs."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

USABLE = 0.95  # of a device's memory: the rest is three CUDA contexts and fragments
WIDE = 2  # bytes of float64 for one of float32


@dataclass(frozen=True)
class MemoryPlan:
    """What is held at the same time.

    batches:  distinct ones that each arm is timed on
    in_turns: an arm that waits gives its batches and its cached memory back
    on_host:  fp64 runs on the CPU
    """

    batches: int
    in_turns: bool = False
    on_host: bool = False

    def describe(self) -> str:
        """One phrase for people."""
        many = f"{self.batches} distinct batch{'es' if self.batches > 1 else ''}"
        where = ", fp64 on the host" if self.on_host else ""
        return f"{many}, {'arms in turns' if self.in_turns else 'arms side by side'}{where}"


PLANS = (  # each needs less memory than the one before
    MemoryPlan(4),
    MemoryPlan(4, in_turns=True),
    MemoryPlan(2, in_turns=True),
    MemoryPlan(1, in_turns=True),
    MemoryPlan(1, in_turns=True, on_host=True),
)
LEAST = 3  # the first plan that holds a single batch: after an OutOfMemoryError there is no use in more


@dataclass(frozen=True)
class Sizes:
    """Bytes of one batch, of what a step returns, and of parameters, buffers and optimizer state."""

    batch: int
    result: int = 0
    state: int = 0

    def side_by_side(self, batches: int) -> int:
        """Two arms (batches, two fresh ones, a copy; the result three times, the state too) beside a reference."""
        arm = (batches + 3) * self.batch + 3 * self.result + 3 * self.state
        reference = 2 * self.batch + WIDE * (self.batch + 4 * self.result + 3 * self.state) + 3 * self.result
        return 2 * arm + reference

    def verified_in_turns(self) -> int:
        """The reference (two drawn batches, fp64's result, the baseline's) beside one arm that takes a step (a batch
        and a copy, an intermediate, the result and a copy); or beside none, while fp64 takes the step."""
        idle = 2 * self.batch + WIDE * self.result + self.result
        states = (WIDE + 2 * 3) * self.state
        arm = 2 * self.batch + 2 * self.result
        fp64 = WIDE * self.batch + WIDE * self.result
        return states + max(idle + arm, idle + fp64)

    def timed(self, batches: int) -> int:
        """Two arms: their batches, and an intermediate, a result and the one that was kept."""
        return 2 * (batches * self.batch + 3 * self.result + 3 * self.state)


def choose(sizes: Sizes, capacity: int, at_least: int = 0) -> int:
    """The index in `PLANS` of the first that fits; the last one where fp64 fits nowhere but on the host.

    capacity: bytes that the device has
    at_least: plans before this one have been tried
    """
    room = USABLE * capacity
    for index, plan in enumerate(PLANS):
        if plan.in_turns:
            fits = plan.on_host or max(sizes.verified_in_turns(), sizes.timed(plan.batches)) <= room
        else:
            fits = sizes.side_by_side(plan.batches) <= room
        if fits and index >= at_least:
            return index
    return len(PLANS) - 1


def thriftier(tried: int) -> int | None:
    """What is left to try after memory ran out with a plan; None where that was the last."""
    following = max(tried + 1, LEAST)
    return following if following < len(PLANS) else None


def capacity(device: torch.device) -> int:
    """Bytes of a card's memory, or of the host's that this process may use."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # a container's share; "max" is no number
        host = min(host, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return host


def give_back(device: torch.device) -> None:
    """Cached memory to the driver, for another process to use."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
