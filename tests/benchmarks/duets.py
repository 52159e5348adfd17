"""How often `python -m optexp.ab` is right about versions whose difference is known: a delay of 2 %, of 10 %, none.

    python tests/benchmarks/duets.py STORE.json [--device cuda] [--pairs 20] [--delay 0 0.02] [--seconds 500] [KEYS]
    python tests/benchmarks/duets.py STORE.json --wait        on a busy CPU: steps wait instead of computing
    python tests/benchmarks/duets.py STORE.json --commands    the same of two commands that print a line a step

A step is 50 equal operations, and 51 or 55 where it is delayed, so that the delay is exact but for what a step costs
beside them. Each version is a commit of a repository that is made for it. STORE.json keeps every comparison: a later
run goes on with what is missing, and every run prints a table of all that is in the store. Times alone are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # of a checkout

from optexp.commands import ab  # noqa: E402
from optexp.pages.blocks import keep  # noqa: E402
from optexp.pages.machine import sentence  # noqa: E402
from optexp.pages.record import Record  # noqa: E402

KEYS = ("device", "kind", "delay", "verdict", "speedup", "base_us", "seconds")  # of a comparison, in its record
OPERATIONS = 50
DELAYS = {0.0: 50, 0.02: 51, 0.1: 55}  # and operations of a step
SIZE = {"cpu": 2**15, "cuda": 2**24}  # elements: some 0.1 ms each
WAIT_S = 2e-3  # instead of an operation: far longer than a busy machine lets a sleeper wait for a core
PROGRAM = """\
import sys
import time

import torch
from part import OPERATIONS, SIZE, WAIT_S
from torch import nn


class Model(nn.Module):
    def forward(self, x, operations=OPERATIONS):
        if WAIT_S:
            time.sleep(WAIT_S * operations)
            return torch.sin(x)
        for _ in range(operations):
            x = torch.sin(x)
        return x


def get_inputs():
    return (torch.randn(SIZE),)


if __name__ == "__main__":
    device, operations, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    model, x = Model(), torch.randn(SIZE, device=device)
    for step in range(steps):
        float(model(x, operations)[0])
        print("step", step, flush=True)
"""


def git(folder: Path, *words: str) -> str:
    named = ["git", "-c", "user.name=benchmark", "-c", "user.email=benchmark@localhost"]
    return subprocess.run([*named, *words], cwd=folder, check=True, capture_output=True, text=True).stdout.strip()


def repository(folder: Path, size: int, wait_s: float) -> dict[float, str]:
    """Commits by their delay, and the one that all are compared with, by −1; equal ones are two commits, too."""
    git(folder, "init", "-q")
    (folder / "net.py").write_text(PROGRAM)
    commits = {}
    for delay, operations in [(-1.0, OPERATIONS), *DELAYS.items()]:
        (folder / "part.py").write_text(f"OPERATIONS, SIZE, WAIT_S = {operations}, {size}, {wait_s}\n")
        git(folder, "add", ".")
        git(folder, "commit", "-qm", f"{delay:.0%}", "--allow-empty")
        commits[delay] = git(folder, "rev-parse", "HEAD")
    return commits


def asked_for(options: argparse.Namespace, commits: dict[float, str], delay: float) -> list[str]:
    """Arguments of one comparison."""
    keys = [f"device={options.device}", *options.keys]
    if options.commands:
        run = f"{sys.executable} net.py {options.device}"
        both = (f"{run} {operations} {options.steps}" for operations in (OPERATIONS, DELAYS[delay]))
        return [*both, "--step", "^step", "--skip", str(options.steps // 4), *keys]
    workload = ["workload=module", "workload.path=net.py", "measurement.load_s=0"]
    return ["--base", commits[-1.0], "--head", commits[delay], "--no-verify", *workload, *keys]


def measure(options: argparse.Namespace) -> None:
    """Comparisons of every delay in turn, kept after each."""
    end, kind = time.monotonic() + options.seconds, "commands" if options.commands else "versions"
    kind += ", waiting" if options.wait else ""
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        commits = repository(folder, SIZE[options.device], WAIT_S if options.wait else 0.0)
        store = options.store.resolve()
        os.chdir(folder)
        while missing := [d for d in options.delay if len(of(read(store), options.device, kind, d)) < options.pairs]:
            if time.monotonic() > end:
                break
            delay = min(missing, key=lambda d: len(of(read(store), options.device, kind, d)))
            began, file = time.monotonic(), folder / "found.json"
            file.unlink(missing_ok=True)
            status = ab.main([*asked_for(options, commits, delay), "--json", str(file)])
            if not file.is_file():  # interrupted, or a mistake, which was said
                sys.exit(status)
            found: dict[str, Any] = json.loads(file.read_text())
            kept = {key: found[key] for key in ("verdict", "headline", "speedup", "base_us", "environment")}
            control = ((found["measurement"] or {}).get("controls") or {}).get("A/A")
            place_of = {"device": options.device, "kind": kind, "delay": delay, "seconds": time.monotonic() - began}
            store.write_text(json.dumps([*read(store), place_of | kept | {"control": control}], indent=1) + "\n")
        os.chdir(store.parent)


def read(store: Path) -> list[dict[str, Any]]:
    return json.loads(store.read_text()) if store.exists() else []


def of(kept: Sequence[dict[str, Any]], device: str, kind: str, delay: float) -> list[dict[str, Any]]:
    return [row for row in kept if (row["device"], row["kind"], row["delay"]) == (device, kind, delay)]


def record(kept: Sequence[dict[str, Any]]) -> Record:
    """Every comparison of the store, with what the table shows."""
    rows = [{**{key: row[key] for key in KEYS}, "name": device(row["environment"])} for row in kept]
    return Record("versions", sentence(kept[-1]["environment"]), rows)


def device(environment: dict[str, Any]) -> str:
    return str(environment.get("gpu") or environment.get("cpu"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="what was found so far; it is made where it is not there")
    parser.add_argument("keys", nargs="*", metavar="KEY=VALUE", help="further keys of every comparison")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--pairs", type=int, default=20, help="comparisons of each delay")
    parser.add_argument("--delay", nargs="+", type=float, choices=DELAYS, default=[0.0, 0.02])
    parser.add_argument("--seconds", type=float, default=500, help="begin nothing more after these (0: only print)")
    parser.add_argument("--commands", action="store_true", help="two commands instead of two commits")
    parser.add_argument("--wait", action="store_true", help="steps wait instead of computing")
    parser.add_argument("--steps", type=int, default=200, help="of a command, the first quarter of which is left out")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    options = parser.parse_intermixed_args()
    options.record = options.record and options.record.resolve()
    measure(options)
    if kept := read(options.store):
        print(record(kept).text())
        if options.record:
            keep(record(kept), "versions", options.record)


if __name__ == "__main__":
    main()
