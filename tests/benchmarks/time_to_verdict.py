"""How long a verdict takes, and where that time goes.

    python tests/benchmarks/time_to_verdict.py [override ...] [--record FOLDER]

Without overrides: workload=mlp strategy=cuda_graph.

Runs the command once to fill the caches and once more for each preset, and prints the phases side by side.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from optexp.pages.blocks import keep
from optexp.pages.machine import sentence
from optexp.pages.record import Record
from optexp.result import Result

PRESETS = ("default", "quick")


def run(overrides: list[str], folder: Path) -> tuple[Result, float]:
    """The command as a user types it, in a folder of its own; its result and its wall seconds."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "optexp", *overrides, f"hydra.run.dir={folder}"]
    finished = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True)
    wall = time.monotonic() - begin
    if not (folder / "result.json").exists():
        sys.exit(finished.stdout + finished.stderr)
    return Result.read(folder / "result.json"), wall


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", default=["workload=mlp", "strategy=cuda_graph"])
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        run([*asked.overrides, "measurement=quick"], Path(scratch) / "warm")
        found = [
            (preset, *run([*asked.overrides, f"measurement={preset}"], Path(scratch) / preset)) for preset in PRESETS
        ]
    rows = [
        {
            "preset": preset,
            "processes": result.speedup.processes if result.speedup else 0,
            "seconds": result.seconds,
            "wall_s": wall,
        }
        for preset, result, wall in found
    ]
    record = Record("phases", sentence(found[0][1].environment), rows)
    print(record.text(), *(result.headline for _, result, _ in found), sep="\n\n")
    if asked.record:
        keep(record, "time_to_verdict", asked.record)


if __name__ == "__main__":
    main()
