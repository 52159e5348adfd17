"""What verification of large tensors costs on a GPU, and where: copies between processes, gates, the whole.

python tests/benchmarks/verification_cost.py [side]     (default 16384: tensors of 1 GiB)
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from time_to_verdict import run  # type: ignore[import-not-found]

from optexp.equivalence.gates import Yardstick, structure
from optexp.equivalence.mutants import Subject, lower_precision, scaled
from optexp.equivalence.poison import poison
from optexp.equivalence.tensor_math import error, histogram, identical, rms
from optexp.support.tolerances import TOLERANCES
from optexp.workers.transfer import Inbox, Outbox

# What a user asks for: all of a quick comparison, and the longest verification.
WHOLE = {
    "quick": ["measurement=quick"],
    "default, nothing timed": ["measurement=default", "verify=only"],
}


def parts(side: int) -> None:
    """Each alone, in this process. Between two, filling and taking overlap."""
    x = torch.randn(side, side, device="cuda")
    g = x.double()
    outbox, inbox = Outbox(on_device=True), Inbox()
    subject = Subject("out", g, 1.0, Yardstick(1e-8, 1e-7), TOLERANCES["float32"])

    def fill() -> None:
        for piece in range(outbox.send([x]).pieces):
            outbox.fill(piece)

    def take() -> None:
        transfer = outbox.send([x])
        inbox.expect(transfer, x.device)
        for piece in range(transfer.pieces):
            inbox.take(piece)

    work: dict[str, Callable[[], object]] = {
        "draw": lambda: torch.randn(side, side, device="cuda"),
        "device to shared memory": fill,
        "shared memory to device": take,
        "error against fp64": lambda: error(x, g, 1.0),
        "rms of fp64": lambda: rms(g),
        "structure": lambda: structure(x, x),
        "identical": lambda: identical(x, x),
        "histogram": lambda: histogram(x, g, 1.0),
        "mutant: scaled": lambda: scaled(subject),
        "mutant: lower precision": lambda: lower_precision(subject),
        "poison": lambda: poison(x.device),
    }
    for name, function in work.items():
        first, again = seconds(function), seconds(function)
        print(f"{name:34}{first * 1e3:9.1f} ms, again {again * 1e3:9.1f} ms")
    outbox.close()


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    begin = time.monotonic()
    work()
    torch.cuda.synchronize()
    return time.monotonic() - begin


def whole(side: int) -> None:
    """Comparisons in which nothing has to be compiled."""
    for name, overrides in WHOLE.items():
        asked = ["workload=gelu", f"workload.size={side}", "strategy=inplace", "tracking.enabled=false", *overrides]
        with tempfile.TemporaryDirectory() as folder:
            result, wall = run(asked, Path(folder) / "job")
        verification = result.seconds.get("verification", 0.0)
        known = result.equivalence.seconds if result.equivalence else {}
        print(f"{name}: {result.verdict}, {wall:.1f} s, verification {verification:.2f} s:")
        print("  ".join(f"{part} {s:.2f}" for part, s in {**known, "rest": verification - sum(known.values())}.items()))


if __name__ == "__main__":
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 16384
    parts(asked)
    torch.cuda.empty_cache()
    whole(asked)
