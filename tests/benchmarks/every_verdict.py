"""Strategies × workloads: a quick verdict of each strategy alone, its bound, and how much of it causes explain.

    python tests/benchmarks/every_verdict.py STORE.json [--only WORKLOAD ...] [--seconds 540] [-- OVERRIDE ...]
    python tests/benchmarks/every_verdict.py STORE.json --table verdicts|others|explained

Nothing else may use the device. STORE.json is complete after each pair, and a later run goes on with what is missing.
Several runs may share it, each on its own device (`-- device=cuda:1`). `bounds.py STORE.json` has its bounds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # of a checkout

from optexp import api
from optexp.comparison import runner
from optexp.result import Result, Verdict
from optexp.support.units import duration
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
EXPLAINED = 0.95  # of a difference, at least
TABLES = VERDICTS, OTHER, CAUSES = "verdicts", "others", "explained"


@dataclass(frozen=True)
class Pair:
    """A strategy on a workload.

    estimate, low, high: of the speedup; None where none was measured
    step_us:             of the baseline
    predicted:           the largest speedup that the strategy's bound allows; None where it has none
    explained:           share of the difference in time that causes add up to; None where nothing is explained
    memory_bytes:        difference in peak memory;  memory_explained: as `explained`
    """

    workload: str
    strategy: str
    verdict: str
    headline: str
    device: str
    seconds: float
    estimate: float | None = None
    low: float | None = None
    high: float | None = None
    step_us: float | None = None
    predicted: float | None = None
    explained: float | None = None
    memory_bytes: int | None = None
    memory_explained: float | None = None

    @property
    def key(self) -> tuple[str, str]:
        return self.workload, self.strategy

    @property
    def decided(self) -> bool:
        return self.verdict in (Verdict.FASTER, Verdict.SLOWER)

    @property
    def reason(self) -> str:
        return self.headline.partition(": ")[2]


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


# --- tables ------------------------------------------------------------------------------------------------------


def verdicts(pairs: Sequence[Pair]) -> str:
    """Rows of strategies, columns of workloads; reasons below."""
    found, reasons = {pair.key: pair for pair in pairs}, list[str]()
    columns = [name for name in WORKLOADS if any(pair.workload == name for pair in pairs)]
    lines = [row(["", *(f"`{name}`" for name in columns)]), "|---" * (len(columns) + 1) + "|"]
    for strategy in (*ALONE, KERNELS, "cpu_affinity", "replace"):
        if any(pair.strategy == strategy and pair.workload in WORKLOADS for pair in pairs):
            cells = (cell(found.get((name, strategy)), reasons) for name in columns)
            lines.append(row([f"`{strategy}`", *cells]))
    return "\n".join([*lines, "", *numbered(reasons)]).rstrip()


def others(pairs: Sequence[Pair]) -> str:
    """A row for each of the other workloads, with intervals; reasons below."""
    found, reasons = {pair.key: pair for pair in pairs}, list[str]()
    lines = [row(["workload", "step", "`fusion`", "interval", "`cuda_graph`", "interval"]), "|---" * 6 + "|"]
    for name in OTHERS:
        ours = [found.get((name, strategy)) for strategy in ("fusion", "cuda_graph")]
        if any(ours):
            step_us = next((pair.step_us for pair in ours if pair and pair.step_us), None)
            cells = [text for pair in ours for text in (cell(pair, reasons), interval(pair))]
            lines.append(row([f"`{name}`", duration(step_us / 1e6) if step_us else "", *cells]))
    return "\n".join([*lines, "", *numbered(reasons)]).rstrip()


def cell(pair: Pair | None, reasons: list[str]) -> str:
    """The verdict, with the ratio where one was measured, else with the number of its reason."""
    if pair is None:
        return ""
    if pair.estimate is not None:
        return f"{pair.verdict} {pair.estimate:.3g}×"
    if pair.reason not in reasons:
        reasons.append(pair.reason)
    return f"{pair.verdict} {reasons.index(pair.reason) + 1}"


def interval(pair: Pair | None) -> str:
    return f"{pair.low:.3g} to {pair.high:.3g}" if pair is not None and pair.low and pair.high else ""


def numbered(reasons: Sequence[str]) -> list[str]:
    return [f"{number}. {reason}" for number, reason in enumerate(reasons, 1)]


def explained(pairs: Sequence[Pair]) -> str:
    """Of each measured pair, the shares of its differences in time and in peak memory that causes add up to."""
    head = ["workload", "strategy", "verdict", "step", "explained", "peak memory", "explained"]
    lines, shares = [row(head), "|---" * 7 + "|"], list[float]()
    for pair in pairs:
        if pair.estimate is None:
            continue
        share = pair.explained if pair.decided else None
        shares += [share or 0.0] if pair.decided else []
        shares += [pair.memory_explained] if pair.memory_explained is not None else []
        told = percent(share) if share is not None else "none" if pair.decided else ""
        memory = f"{pair.memory_bytes:+,} B" if pair.memory_bytes is not None else ""
        cells = [f"`{pair.workload}`", f"`{pair.strategy}`", pair.verdict, f"{pair.estimate:.3g}×", told, memory]
        lines.append(row([*cells, percent(pair.memory_explained)]))
    reached = sum(share >= EXPLAINED for share in shares)
    return "\n".join([*lines, "", f"{reached} of {len(shares)} differences are explained by at least {EXPLAINED:.0%}."])


def percent(share: float | None) -> str:
    return f"{share:.0%}" if share is not None else ""


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


TABLE = {VERDICTS: verdicts, OTHER: others, CAUSES: explained}


def main() -> None:
    arguments = sys.argv[1:]
    at = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--only", nargs="+", default=[], choices=[*WORKLOADS, *OTHERS])
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--table", choices=TABLES)
    options = parser.parse_args(arguments[:at])
    options.store, options.overrides = options.store.resolve(), arguments[at + 1 :]
    if options.table is None:
        launching.launcher()
        work(options)
    print(TABLE[options.table or VERDICTS](list(Kept(options.store, Pair).rows().values())))


if __name__ == "__main__":
    main()
