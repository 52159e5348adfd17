"""Strategies × workloads: what the quick preset says of each strategy alone.

python tests/benchmarks/every_verdict.py run FOLDER [OVERRIDE ...]   nothing else may use the GPU
python tests/benchmarks/every_verdict.py write FOLDER                the table, as Markdown
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from optexp.result import Result

WORKLOADS = "gelu,elementwise,layernorm_linear,softmax,mlp,lenet5,branches,training,bert"
STRATEGIES = (
    "amp,tf32,channels_last,inplace,fusion,cuda_graph,streams,pinned_memory,memory_pool,fused_optimizer,"
    "compiled_optimizer,inference_mode"
)


def run(folder: Path, overrides: list[str]) -> None:
    command = [sys.executable, "-m", "optexp", "-m", f"workload={WORKLOADS}", "measurement=quick"]
    command += ["measurement.process_s=2", "measurement.warmup_s=1", "tracking.enabled=false", *overrides]
    for name, strategy in (
        ("1", [f"strategy={STRATEGIES}"]),
        ("2", ["strategy=fusion", "++strategy.fusion.backend=kernels"]),
    ):
        subprocess.run([*command, *strategy, f"hydra.sweep.dir={folder.resolve() / name}"], check=False)


def table(folder: Path) -> str:
    results = [Result.read(path) for path in sorted(folder.rglob("result.json"))]
    cells = {(result.workload, result.strategy[0]): result for result in results}
    rows, columns = (list(dict.fromkeys(key[axis] for key in cells)) for axis in (1, 0))
    reasons: list[str] = []
    lines = ["| | " + " | ".join(f"`{c}`" for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        lines.append(f"| `{row}` | " + " | ".join(cell(cells.get((c, row)), reasons) for c in columns) + " |")
    return "\n".join([*lines, "", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))]).rstrip()


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
