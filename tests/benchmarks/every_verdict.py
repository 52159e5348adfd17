"""Strategies × workloads: what the quick preset says of each strategy alone.

python tests/benchmarks/every_verdict.py run FOLDER [SWEEP ...]   nothing else may use the GPU; again: goes on
python tests/benchmarks/every_verdict.py write FOLDER             the table, as Markdown
python tests/benchmarks/every_verdict.py explained FOLDER         shares of the differences that causes add up to
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from optexp.result import Result, Verdict

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


def explained(folder: Path) -> str:
    """Of each pair, the share of the timed difference and of that of peak memory which named causes add up to."""
    lines = ["| workload | strategy | verdict | step | explained | peak memory | explained |", "|---" * 7 + "|"]
    shares: list[float] = []
    for path in sorted(folder.rglob("result.json")):
        result = Result.read(path)
        time, memory = result.profile.difference, result.profile.memory
        if not result.verdict.measured or result.speedup is None:
            continue
        decided = result.verdict in (Verdict.FASTER, Verdict.SLOWER)
        share = time.explained if time is not None and decided else None
        step = f"{result.speedup.estimate:.3g}×"
        row = [result.workload, "+".join(result.strategy), str(result.verdict), step]
        row += [f"{share:.0%}" if share is not None else ("none" if decided else "")]
        row += [f"{memory.after_bytes - memory.before_bytes:+,} B", f"{memory.explained:.0%}"] if memory else ["", ""]
        shares += [share or 0.0] if decided else []
        shares += [memory.explained] if memory else []
        lines.append("| " + " | ".join(row) + " |")
    reached = sum(share >= 0.95 for share in shares)
    return "\n".join([*lines, "", f"{reached} of {len(shares)} differences are explained by at least 95 %."])


def main() -> None:
    command, *rest = sys.argv[1:] or ["help"]
    if command == "run" and rest:
        run(Path(rest[0]), rest[1:])
    elif command == "write" and rest:
        print(table(Path(rest[0])))
    elif command == "explained" and rest:
        print(explained(Path(rest[0])))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
