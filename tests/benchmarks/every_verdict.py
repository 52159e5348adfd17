"""Strategies × workloads: a quick verdict of each strategy alone, its bound, and how much of it causes explain.

    python tests/benchmarks/every_verdict.py STORE.json [--only WORKLOAD ...] [--seconds 540] [-- OVERRIDE ...]
    python tests/benchmarks/every_verdict.py STORE.json --seconds 0 [--record FOLDER]     only print

Nothing else may use the device. STORE.json is complete after each pair, and a later run goes on with what is missing.
Several runs may share it, each on its own device (`-- device=cuda:1`).
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # of a checkout

import torch

from optexp import api
from optexp.comparison import runner
from optexp.pages.blocks import keep
from optexp.pages.machine import of_rows
from optexp.pages.record import Record
from optexp.pages.rules.strategies import Pair
from optexp.result import Result
from optexp.workers import launching
from tests.benchmarks.kept import Kept, keep_if_beyond

WORKLOADS = ["gelu", "elementwise", "layernorm_linear", "softmax", "mlp", "lenet5", "branches", "bert", "training"]
OTHERS = ["add", "matmul", "cdist", "linear_gelu", "vision", "causal_lm", "sleep", "graph_break", "changing_shapes"]
OTHERS += ["workspace", "pipeline"]
ALONE = ["fusion", "cuda_graph", "amp", "tf32", "channels_last", "inplace", "streams", "pinned_memory", "prefetch"]
ALONE += ["memory_pool", "fused_optimizer", "compiled_optimizer", "inference_mode"]
KERNELS = "fusion[backend=kernels]"
SECONDS = Path(__file__).with_name("seconds.py").resolve()
QUICK = ["measurement=quick", "measurement.process_s=2", "measurement.warmup_s=1", "tracking.enabled=false"]


def wanted(only: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Workloads and strategies; of some workloads, or of all."""
    pairs = [(workload, row) for workload in WORKLOADS for row in (*ALONE, KERNELS, "cpu_affinity", "replace")]
    pairs += [(workload, row) for workload in OTHERS for row in ("fusion", "cuda_graph")]
    yield from (pair for pair in pairs if pair[0] in (only or [pair[0]]))


def overrides(workload: str, strategy: str) -> list[str]:
    """Of a pair's comparison, but for its strategy."""
    asked = [*QUICK, f"workload={workload}"]
    asked += ["measurement.cpus=all"] if strategy == "cpu_affinity" else []
    return asked


def members(workload: str, strategy: str) -> dict[str, dict[str, object]]:
    return {"replace": {"target": f"{SECONDS}:{workload}"}} if strategy == "replace" else api.members(strategy)


def run(workload: str, strategy: str, more: Sequence[str], beyond: Path) -> Pair:
    """One comparison in this process: the launcher and its imports serve all of them.

    beyond: for the record of one that measured more than its bound
    """
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pair-") as folder:
        config = api.compose([*overrides(workload, strategy), *more], members(workload, strategy), {})
        result = runner.run(config, Path(folder), show=lambda *_: None)
        keep_if_beyond(result, Path(folder), beyond / f"{workload}_{strategy}")
    return of_result(result, workload, strategy, round(time.monotonic() - began, 1))


def of_result(result: Result, workload: str, strategy: str, seconds: float) -> Pair:
    device = str(result.environment.get("gpu") or "CPU")
    facts = workload, strategy, str(result.verdict), result.headline, device, seconds
    if result.speedup is None or not result.verdict.measured:
        return Pair(*facts)
    found, bound = result.speedup, result.profile.prediction
    time_, memory = result.profile.difference, result.profile.memory
    return Pair(
        *facts, found.estimate, found.low, found.high, result.baseline.step_us,
        predicted=bound.prediction.speedup if bound else None,
        explained=time_.explained if time_ else None,
        memory_bytes=memory.after_bytes - memory.before_bytes if memory else None,
        memory_explained=memory.explained if memory else None,
    )  # fmt: skip


def work(options: argparse.Namespace) -> None:
    """Every missing pair, until the time is over."""
    store, end = Kept(options.store, Pair), time.monotonic() + options.seconds
    for pair in wanted(options.only):
        if pair in store.rows():
            continue
        if time.monotonic() >= end:
            print("no time for more: run the command again to go on", flush=True)
            return
        store.add(found := run(*pair, options.overrides, options.store.with_suffix(".beyond")))
        print(f"{found.seconds:6.1f} s  {found.workload} × {found.strategy}: {found.headline}", flush=True)


# --- records -----------------------------------------------------------------------------------------------------


def records(found: Mapping[Hashable, Pair], machine: str) -> dict[str, Record]:
    """Of the pages that show these pairs, by name."""
    pairs = [found[key] for key in wanted([]) if key in found]
    grid, others = (
        [asdict(pair) for pair in pairs if (pair.workload in WORKLOADS) is inner] for inner in (True, False)
    )
    timed = [pair for pair in pairs if pair.estimate is not None]
    bounds = [
        {
            "workload": pair.workload,
            "strategy": pair.strategy,
            "verdict": pair.verdict,
            "measured": pair.estimate,
            "predicted": pair.predicted,
        }
        for pair in timed
    ]
    explained = [{**asdict(pair), "headline": "", "seconds": 0.0} for pair in timed]
    blocks = {
        "strategies": Record("strategies", machine, grid, {"table": "grid"}),
        "strategies.others": Record("strategies", machine, others, {"table": "intervals"}),
        "why.explained": Record("strategies", machine, explained, {"table": "explained"}),
        "bounds": Record("bounds", machine, bounds),
    }
    return {name: record for name, record in blocks.items() if record.rows}


def main() -> None:
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--only", nargs="+", default=[], choices=[*WORKLOADS, *OTHERS])
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    options = parser.parse_args(arguments[:at])
    options.store, options.overrides = options.store.resolve(), arguments[at + 1 :]
    if options.seconds:
        launching.launcher()
        work(options)
    device = "cpu" if "device=cpu" in options.overrides or not torch.cuda.is_available() else "cuda"
    rows = Kept(options.store, Pair).rows()
    for name, record in records(rows, of_rows([pair.device for pair in rows.values()], device)).items():
        print(f"\n{name}\n\n{record.text()}")
        if options.record:
            keep(record, name, options.record)


if __name__ == "__main__":
    main()
