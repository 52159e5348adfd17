"""Plans for a device's memory: number of distinct batches, arms side by side or in turns, fp64 on card or host."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

USABLE = 0.95  # of a device's memory: the rest is for three CUDA contexts and fragmentation
WIDE = 2  # size of float64 over float32


@dataclass(frozen=True)
class MemoryPlan:
    """How arms and reference share the device's memory.

    batches:  number of distinct batches that each arm is timed on
    in_turns: whether a waiting arm gives back its batches and its cached memory
    on_host:  whether the fp64 reference runs on the CPU
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
LEAST = 3  # the first plan with a single batch: after an OutOfMemoryError, plans with more are skipped


@dataclass(frozen=True)
class Sizes:
    """Bytes of one batch, of a step's result, and of the state (parameters, buffers, optimizer)."""

    batch: int
    result: int = 0
    state: int = 0

    def side_by_side(self, batches: int) -> int:
        """Bytes of two arms (batches, two fresh ones and a copy; three results; three states) and the reference."""
        arm = (batches + 3) * self.batch + 3 * self.result + 3 * self.state
        reference = 2 * self.batch + WIDE * (self.batch + 4 * self.result + 3 * self.state) + 3 * self.result
        return 2 * arm + reference

    def verified_in_turns(self, batches: int) -> int:
        """Bytes of verification in turns: all states, and the largest of three moments.

        A step on a fresh batch, of an arm or of fp64, runs beside the idle reference, which holds two drawn batches,
        the fp64 result and the baseline's result; an arm's step needs a batch and a copy, the result and a copy. A
        repeated step of an arm runs beside the reference with that step's batch and results; the arm holds the timed
        batches with two copies of its own batch, or, while they get other values, all of them twice.
        """
        states = (WIDE + 2 * 3) * self.state
        results = WIDE * self.result + self.result
        idle = 2 * self.batch + results
        arm = 2 * self.batch + 2 * self.result
        fp64 = WIDE * self.batch + WIDE * self.result
        copied = (batches + 2) * self.batch + 2 * self.result
        renewed = 2 * batches * self.batch + self.result
        return states + max(idle + arm, idle + fp64, self.batch + results + max(copied, renewed))

    def timed(self, batches: int) -> int:
        """Bytes of two timed arms: batches, an intermediate, a result and the last result, three states.

        One arm at a time is timed on other batches, too; a feed may copy one. The other arm then holds two results.
        """
        both = 2 * batches * self.batch + 6 * self.result
        others = (2 * batches + 1) * self.batch + 5 * self.result
        return max(both, others) + 6 * self.state


def choose(sizes: Sizes, capacity: int, at_least: int = 0) -> int:
    """The index in `PLANS` of the first plan that fits; the last plan, with fp64 on the host, always counts as fitting.

    capacity: bytes of the device's memory
    at_least: index of the first plan to consider; earlier plans have failed
    """
    room = USABLE * capacity
    for index, plan in enumerate(PLANS):
        if plan.in_turns:
            fits = plan.on_host or max(sizes.verified_in_turns(plan.batches), sizes.timed(plan.batches)) <= room
        else:
            fits = sizes.side_by_side(plan.batches) <= room
        if fits and index >= at_least:
            return index
    return len(PLANS) - 1


def choose_on(device: torch.device, sizes: Sizes, sharing: int = 1, at_least: int = 0) -> int:
    """`choose` for a device whose memory several comparisons share.

    What fits in its share by fp64 on the host alone, which takes minutes, has the plan of the whole device: others may
    need less than theirs, and who runs out of memory tries the next plan.

    sharing: number of these comparisons
    """
    shared = choose(sizes, capacity(device, sharing), at_least)
    return choose(sizes, capacity(device), at_least) if PLANS[shared].on_host else shared


def thriftier(tried: int) -> int | None:
    """The index of the next plan after one that ran out of memory; None after the last."""
    following = max(tried + 1, LEAST)
    return following if following < len(PLANS) else None


def capacity(device: torch.device, sharing: int = 1) -> int:
    """Bytes of a card's memory, or of the host memory that this process may use; of these, one comparison's part.

    sharing: comparisons that use the device
    """
    return _whole(device) // sharing


def _whole(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # a container's limit; "max" is no number
        host = min(host, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return host


def give_back(device: torch.device) -> None:
    """Return cached memory to the driver, so that another process can use it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
