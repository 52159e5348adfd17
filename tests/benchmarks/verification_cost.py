"""Seconds of verifying large tensors on a GPU, by part: copies between processes, gates, the whole.

python tests/benchmarks/verification_cost.py [side] [--record FOLDER]     (default 16384: tensors of 1 GiB)
"""

from __future__ import annotations

import argparse
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
from optexp.pages.blocks import keep
from optexp.pages.machine import sentence
from optexp.pages.record import Record
from optexp.support.tolerances import TOLERANCES
from optexp.workers.transfer import Inbox, Outbox

# All of a quick comparison, and the longest verification.
WHOLE = ("measurement=quick", "verify=only")


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


def whole(side: int) -> Record:
    """Comparisons in which nothing has to be compiled."""
    rows, result = [], None
    for typed in WHOLE:
        asked = ["workload=gelu", f"workload.size={side}", "strategy=inplace", "tracking.enabled=false", *typed.split()]
        with tempfile.TemporaryDirectory() as folder:
            result, wall_s = run(asked, Path(folder) / "job")
        known = result.equivalence.seconds if result.equivalence else {}
        verification_s = result.seconds.get("verification", 0.0)
        facts = {"command": typed, "verdict": str(result.verdict), "seconds": known}
        rows.append({**facts, "verification_s": verification_s, "wall_s": wall_s})
    assert result is not None
    return Record("verification_cost", sentence(result.environment), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("side", nargs="?", type=int, default=16384)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    options = parser.parse_args()
    parts(options.side)
    torch.cuda.empty_cache()
    found = whole(options.side)
    print(found.text())
    if options.record:
        keep(found, "time_to_verdict.verification", options.record)
