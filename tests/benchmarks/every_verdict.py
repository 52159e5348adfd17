"""Strategies × workloads: what the quick preset says of each strategy alone.

python tests/benchmarks/every_verdict.py run FOLDER [OVERRIDE ...]   nothing else may use the GPU; again: goes on
python tests/benchmarks/every_verdict.py write FOLDER                the table, as Markdown
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from optexp.result import Result

SMALL, LARGE = "gelu,elementwise,layernorm_linear,softmax,mlp,lenet5,branches", "bert,training"
ALONE = "amp,tf32,channels_last,inplace,streams,pinned_memory,memory_pool,fused_optimizer,compiled_optimizer,"
ALONE += "inference_mode,prefetch,cpu_affinity"
SWEEPS = {
    "graphs": f"workload={SMALL},{LARGE} strategy=fusion,cuda_graph",
    "small": f"workload={SMALL} strategy={ALONE}",
    "large": f"workload={LARGE} strategy={ALONE}",
    "kernels": f"workload={SMALL},{LARGE} strategy=fusion ++strategy.fusion.backend=kernels",
}


def run(folder: Path, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "optexp", "-m", "measurement=quick"]
    command += ["measurement.process_s=2", "measurement.warmup_s=1", "tracking.enabled=false", *overrides]
    for name, choices in SWEEPS.items():
        place = folder.resolve() / name
        if not (place / "sweep.json").exists():  # a sweep that was cut off is made again
            subprocess.run([*command, *choices.split(), f"hydra.sweep.dir={place}"], check=False)


def table(folder: Path) -> str:
    results = [Result.read(path) for path in sorted(folder.rglob("result.json"))]
    cells = {(result.workload, strategy(result)): result for result in results}
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (1, 0))
    reasons: list[str] = []
    lines = ["| | " + " | ".join(f"`{c}`" for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        lines.append(f"| `{row}` | " + " | ".join(cell(cells.get((c, row)), reasons) for c in columns) + " |")
    return "\n".join([*lines, "", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))]).rstrip()


def strategy(result: Result) -> str:
    """Its name, with the backend of a fusion that is not inductor's."""
    (name,) = result.strategy
    backend = result.config.get(f"strategy.{name}.backend", "inductor")
    return name if backend == "inductor" else f"{name}: {backend}"


def cell(result: Result | None, reasons: list[str]) -> str:
    """The verdict, with the ratio where one was measured, else with the number of its reason."""
    if result is None:
        return ""
    if result.speedup and result.verdict.measured:
        return f"{result.verdict} {result.speedup.estimate:.3g}×"
    reason = result.headline.partition(": ")[2]
    if reason not in reasons:
        reasons.append(reason)
    return f"{result.verdict} {reasons.index(reason) + 1}"


def main() -> None:
    command, *rest = sys.argv[1:] or ["help"]
    if command == "run" and rest:
        run(Path(rest[0]), rest[1:])
    elif command == "write" and rest:
        print(table(Path(rest[0])))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
