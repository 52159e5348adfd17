"""One honest pair on many seeds: compiled once, then verified on the same arms; each refusal is counted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from optexp.config import search_path
from optexp.workload import Workload
from optexp.workloads.bert import Bert
from optexp.workloads.lenet5 import LeNet5
from optexp.workloads.mlp import Mlp
from tests.benchmarks.calibrate_gates import strategy, verifications

PAIRS: dict[str, tuple[Callable[[], Workload], str]] = {  # as their YAMLs have them
    "mlp × fusion": (Mlp, "fusion"),
    "lenet5 × fusion": (lambda: LeNet5(mode="train"), "fusion"),
    "bert × fusion": (Bert, "fusion"),
}


@dataclass
class Counted:
    """Verifications of one pair: how many, how many refused, the largest share of a limit, and the refusals' words."""

    seeds: int = 0
    alarms: int = 0
    used: float = 0.0
    worst: str = ""
    headlines: list[str] = field(default_factory=list)


def count(name: str, device: str, first: int, seeds: int, seconds: float) -> Counted:
    """Verify on as many of `seeds` as there is time for, from `first` on."""
    search_path.register()
    make, member = PAIRS[name]
    found, end = Counted(), time.monotonic() + seconds
    for seen in verifications(make().resolve(device), [strategy(member)], device, "float32", seeds, first):
        found.seeds += 1
        found.alarms += not seen.ok
        if seen.worst and seen.worst.used > found.used:
            found.used, found.worst = seen.worst.used, f"{seen.worst.gate} {seen.worst.tensor}"
        if not seen.ok:
            found.headlines.append(seen.headline)
        if time.monotonic() > end:
            break
    return found
