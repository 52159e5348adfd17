"""Times of a call: device time by replayed graphs, host time by calls from Python; candidates take turns."""

from __future__ import annotations

import random
import sys
from functools import partial
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor
from triton.errors import TritonError

from optexp.kernelkit.benchmark.calls import Call, argument_sets, differentiated, in_turn
from optexp.kernelkit.benchmark.rows import HostCost, HostTimes
from optexp.kernelkit.kernel import Case, Kernel
from optexp.kernelkit.recording import recorded, rehearsal
from optexp.measurement import clock


class Prepared(NamedTuple):
    """A candidate, ready to be timed.

    work:   makes `calls` calls
    steps:  number of times that a block runs `work`
    """

    work: Call
    calls: int
    steps: int


def race(
    calls: dict[str, list[Call]], device: torch.device, rounds: int, block_s: float = 3e-3
) -> dict[str, float | None]:
    """µs of a call by candidate: the median over rounds, in which candidates take turns; None for a failing candidate.

    A block of work that lasts ten times `block_s` is timed once.
    """
    ready: dict[str, Prepared] = {}
    found: dict[str, float | None] = dict.fromkeys(calls)
    for name, every in calls.items():
        try:
            ready[name] = prepare(every, device, block_s)
        except (RuntimeError, ValueError, TritonError) as error:
            print(f"{name}: {str(error).splitlines()[0]}", file=sys.stderr)
    samples: dict[str, list[float]] = {name: [] for name in ready}
    order, shuffle = list(ready), random.Random(0).shuffle
    for _ in range(rounds):
        shuffle(order)  # after a long GEMM the card is hotter
        for name in order:
            work, count, steps = ready[name]
            if steps == 1 and samples[name]:
                continue
            samples[name].append(clock.device_step_s(work, steps, device) / count * 1e6)
    return found | {name: median(values) for name, values in samples.items()}


@rehearsal()  # small calls then run our kernels, as in a graph
def prepare(every: list[Call], device: torch.device, block_s: float) -> Prepared:
    """These calls as one function: on a GPU a CUDA graph, so that the device sets the pace.

    Raises:
        RuntimeError, ValueError, TritonError: A call fails, or cannot be captured.
    """
    for call in (*every, every[0]):  # compiles, and chooses the fastest config
        call()
    if device.type == "cuda":
        # Up to 100 calls, so that the device still works when a slow host asks for the next replay. Before a replay,
        # torch also advances its random generator if the graph uses it.
        once = clock.time_block(partial(in_turn, every), 1, device).wall_s
        every = every * max(4 if len(every) == 1 else 1, min(100 // len(every), int(4e-3 / once)))
        work: Call = recorded(every, device)
    else:
        work = partial(in_turn, every)
    once = clock.time_block(work, 1, device).wall_s
    return Prepared(work, len(every), 1 if once > 10 * block_s else max(2, min(50, int(block_s / once))))


# --- calls from Python -------------------------------------------------------------------------------------------


def host_bound_cases(kernel: Kernel, device: torch.device) -> list[Case]:
    """Host-bound cases and, on a GPU, larger cases up to device-bound ones."""
    sizes = {case.name: case.arguments(partial(torch.empty, device="meta"))[0].numel() for case in kernel.benchmarks}
    powers = (20, 22, 24, 25) if device.type == "cuda" else ()
    larger = [Case(f"2^{power}", partial(kernel.sweep, size=2**power)) for power in powers]
    return [*(case for case in kernel.benchmarks if sizes[case.name] <= 2**18), *larger]


def host_cost(kernel: Kernel, case: Case, device: torch.device) -> HostCost:
    """Wall times of consecutive calls: the minimum over ten blocks; kinds of calls take turns."""
    args = argument_sets(case, torch.float32, device, cold=False)[0]
    leaves = [arg.requires_grad_() if isinstance(arg, Tensor) else arg for arg in args]
    dy = torch.ones_like(kernel.reference(*args))
    calls: dict[tuple[str, str], Call] = {}
    for name, function in (("eager", kernel.reference), ("ours", kernel.function)):
        forward = partial(function, *leaves)
        calls[name, "forward"] = forward
        calls[name, "grad"] = forward
        calls[name, "both_passes"] = partial(in_turn, differentiated(function, args, dy))
    best = dict[tuple[str, str], float]()
    for _ in range(10):  # in turns, as a host's speed varies more from second to second than calls differ
        for kind, call in calls.items():
            with torch.set_grad_enabled(kind[1] != "forward"):
                if kind not in best:
                    call()
                    best[kind] = clock.time_block(call, 2, device).wall_s
                # Recomputed in each round: after a slow first block all blocks would have few steps, and the wait for
                # the device at their end would weigh much.
                steps = max(1, min(100, int(0.01 / best[kind])))
                best[kind] = min(best[kind], clock.time_block(call, steps, device).wall_s)
    eager, ours = (
        HostTimes(*(1e6 * best[name, kind] for kind in ("forward", "grad", "both_passes")))
        for name in ("eager", "ours")
    )
    return HostCost(kernel.name, case.name, eager, ours)
