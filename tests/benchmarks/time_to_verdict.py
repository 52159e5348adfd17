"""How long a verdict takes, and where that time goes.

    python tests/benchmarks/time_to_verdict.py [override ...]     (default: workload=mlp strategy=cuda_graph)

Runs the command once to fill the caches and once more for each preset, and prints the phases side by side.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from optexp.result import Result

PRESETS = ("default", "quick")
PHASES = ("import", "arms", "verification", "profile", "measurement", "record", "tracking")


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
    overrides = sys.argv[1:] or ["workload=mlp", "strategy=cuda_graph"]
    with tempfile.TemporaryDirectory() as scratch:
        run([*overrides, "measurement=quick"], Path(scratch) / "warm")
        rows = [(preset, *run([*overrides, f"measurement={preset}"], Path(scratch) / preset)) for preset in PRESETS]
    print(" ".join(overrides), f"on {rows[0][1].environment.get('gpu') or rows[0][1].environment.get('cpu')}")
    print(f"{'seconds':<14}" + "".join(f"{preset:>10}" for preset, _, _ in rows))
    for phase in PHASES:
        print(f"{phase:<14}" + "".join(f"{r.seconds.get(phase, 0.0):>10.2f}" for _, r, _ in rows))
    print(f"{'command':<14}" + "".join(f"{wall:>10.2f}" for _, _, wall in rows))
    shares = [1 - r.seconds.get("measurement", 0.0) / wall for _, r, wall in rows]
    print(f"{'not measuring':<14}" + "".join(f"{share:>10.0%}" for share in shares))
    for preset, result, _ in rows:
        print(f"{preset}: {result.headline}")


if __name__ == "__main__":
    main()
