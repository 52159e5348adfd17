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
from time_to_verdict import run

from optexp.equivalence.gates import error, histogram, identical, rms, structure
from optexp.equivalence.poison import poison
from optexp.parcel import Inbox, Outbox


def parts(side: int) -> None:
    """Each alone, in this process."""
    x = torch.randn(side, side, device="cuda")
    g = x.double()
    outbox, inbox = Outbox(("/dev/shm",)), Inbox()
    work: dict[str, Callable[[], object]] = {
        "send: device to shared memory": lambda: outbox.send([x]),
        "receive: shared memory to device": lambda: inbox.receive(outbox.send([x[:1]]))[0].to("cuda"),
        "send and receive": lambda: inbox.receive(outbox.send([x]))[0].to("cuda"),
        "error against fp64": lambda: error(x, g, 1.0),
        "rms of fp64": lambda: rms(g),
        "structure": lambda: structure(x, x),
        "identical": lambda: identical(x, x),
        "histogram": lambda: histogram(x, g, 1.0),
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
    """A verification without a measurement, as a user asks for it."""
    for sets, thorough in ((1, "false"), (5, "true")):
        overrides = ["workload=gelu", f"workload.size={side}", "strategy=inplace", "verify=only"]
        overrides += ["tracking.enabled=false", f"measurement.verification_seeds={sets}"]
        with tempfile.TemporaryDirectory() as folder:
            result, wall = run([*overrides, f"measurement.thorough={thorough}"], Path(folder) / "job")
        print(
            f"gelu, {sets} sets, thorough={thorough}: {result.verdict}, {wall:.1f} s, {result.measurement['seconds']}"
        )


if __name__ == "__main__":
    asked = int(sys.argv[1]) if len(sys.argv) > 1 else 16384
    parts(asked)
    torch.cuda.empty_cache()
    whole(asked)
