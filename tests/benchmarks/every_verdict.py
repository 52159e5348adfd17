"""Strategies × workloads: what the quick preset says of each strategy alone.

python tests/benchmarks/every_verdict.py run FOLDER [SWEEP ...]   nothing else may use the GPU; again: goes on
python tests/benchmarks/every_verdict.py write FOLDER             the table, as Markdown
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from optexp.result import Result

WORKLOADS = ["gelu", "elementwise", "layernorm_linear", "softmax", "mlp", "lenet5", "branches", "bert", "training"]
ALONE = ["fusion", "cuda_graph", "amp", "tf32", "channels_last", "inplace", "streams", "pinned_memory", "prefetch"]
ALONE += ["memory_pool", "fused_optimizer", "compiled_optimizer", "inference_mode"]
SECONDS = Path(__file__).with_name("seconds.py").resolve()
QUICK = ["measurement=quick", "measurement.process_s=2", "measurement.warmup_s=1", "tracking.enabled=false"]


def sweeps() -> Iterator[tuple[str, list[str]]]:
    """Their names, and what is asked."""
    everywhere = f"workload={','.join(WORKLOADS)}"
    yield "kernels", [everywhere, "strategy=fusion", "++strategy.fusion.backend=kernels"]
    yield "affinity", [everywhere, "strategy=cpu_affinity", "measurement.cpus=all"]
    for workload in WORKLOADS:
        yield workload, [f"workload={workload}", f"strategy={','.join(ALONE)}"]
        second = f"strategy.replace.target={SECONDS}:{workload}"
        yield f"{workload}_replaced", [f"workload={workload}", "strategy=replace", second]


def run(folder: Path, names: list[str]) -> None:
    """All of them, or those that are named."""
    for name, asked in sweeps():
        place = folder.resolve() / name
        if name in (names or [name]) and not (place / "sweep.json").exists():  # what was cut off is made again
            command = [sys.executable, "-m", "optexp", "-m", *QUICK, *asked, f"hydra.sweep.dir={place}"]
            subprocess.run(command, check=False)


def table(folder: Path) -> str:
    results = [Result.read(path) for path in sorted(folder.rglob("result.json"))]
    cells = {(result.workload, strategy(result)): result for result in results}
    rows = sorted({row for _, row in cells}, key=lambda row: ALONE.index(row) if row in ALONE else len(ALONE))
    columns = [workload for workload in WORKLOADS if any(c == workload for c, _ in cells)]
    reasons: list[str] = []
    lines = ["| | " + " | ".join(f"`{c}`" for c in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for row in rows:
        lines.append(f"| `{row}` | " + " | ".join(cell(cells.get((c, row)), reasons) for c in columns) + " |")
    return "\n".join([*lines, "", *(f"{i}. {reason}" for i, reason in enumerate(reasons, 1))]).rstrip()


def strategy(result: Result) -> str:
    """Its name without options, but for the backend of a fusion that is not inductor's."""
    name = result.strategy[0].partition("[")[0]
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
