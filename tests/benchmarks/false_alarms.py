"""How often the measurement is wrong: of programs against themselves, with known delays, and beside other clocks.

    python tests/benchmarks/false_alarms.py STORE.json [--seconds 200] [--device cpu] [--clocks] [--record FOLDER]

Measures alone: nothing is verified or profiled. What it finds is added to STORE.json, so that a hundred comparisons may
be made in several runs, and everything that is in there is printed as Markdown. `--clocks` compares our kernel times
with CUPTI's and with triton.testing.do_bench instead.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median, stdev
from typing import Any

import torch

from optexp.api import compose
from optexp.comparison.machine import choose_device
from optexp.comparison.sampling import sample
from optexp.comparison.session import Session
from optexp.config import resolve
from optexp.measurement import clock, placement, process_spread, statistics
from optexp.measurement.process_spread import StepKind
from optexp.measurement.samples import Sample
from optexp.measurement.settings import MeasurementSettings
from optexp.pages.blocks import keep
from optexp.pages.machine import here, of_rows
from optexp.pages.record import Record
from optexp.reporting.terminal import Progress
from optexp.support.stopwatch import Stopwatch
from optexp.workers.arm import Arm
from optexp.workers.client import Client, Pending
from optexp.workers.messages import WarmUp

WORKLOADS = {
    "cuda": {
        "mlp": ["workload=mlp"],
        "mlp, captured": ["workload=mlp", "baseline=[cuda_graph]"],
        "gelu": ["workload=gelu", "workload.size=4096"],
        "matmul": ["workload=matmul", "dtype=bfloat16"],
        "lenet5": ["workload=lenet5"],
    },
    "cpu": {
        "mlp": ["workload=mlp", "workload.dim=64", "workload.layers=2"],
        "gelu": ["workload=gelu", "workload.size=128"],
        "matmul": ["workload=matmul", "workload.size=128"],
        "softmax": ["workload=softmax", "workload.rows=64", "workload.columns=256"],
        "lenet5": ["workload=lenet5", "workload.batch_size=4"],
    },
}
FIXED = [
    "replay=benchmarks",
    "measurement.warmup_s=0.25",
    "environment.allow_foreign=true",
]  # the card is never cold here
KEYS = ("workload", "delay", "verdict", "interval", "step_us", "going_first")  # of a comparison, in its record
BLOCKS = {
    ("cpu", "default"): "false_alarms.cpu",
    ("cpu", "quick"): "false_alarms.one_process",
    ("cuda", "quick"): "false_alarms.one_process_of_a_gpu",
}
DELAYS = {0.02: 50, 0.05: 20}  # and of how many steps each is a whole number


@dataclass
class Warm(Client[Arm]):
    """An arm that is warmed up once, however often it is measured, and that may seem slower than it is.

    delay:   of its own steps: it runs so many more than it tells
    whole:   blocks of both arms have this many steps, or a multiple: they last as long as each other
    steady:  of its warm-up; empty before
    """

    arm: Client[Arm]
    delay: float
    whole: int
    steady: list[WarmUp]

    def __post_init__(self) -> None:
        self.name, self.pid = self.arm.name, self.arm.pid

    def start(self, method: Callable[..., Any], *args: Any, **arguments: Any) -> Pending[Any]:
        if method is Arm.warm_up:
            self.steady = self.steady or [self.arm.call(Arm.warm_up, *args, **arguments)]
            return Pending(lambda: self.steady[0])
        if method is not Arm.block:
            return self.arm.start(method, *args, **arguments)
        told = -(-arguments["steps"] // self.whole) * self.whole
        timing = self.arm.call(Arm.block, **arguments | {"steps": round(told * (1 + self.delay))}).told_as(told)
        return Pending(lambda: timing)

    def close(self) -> None:
        self.arm.close()


def comparisons(
    session: Session, seed: int, pairs: int, limit: int, equal: int, delays: list[float], end: float
) -> Iterator[dict[str, Any]]:
    """So many comparisons of the baseline with itself, and with a delayed self, until each is precise enough: arms of
    all of them are started together, and measured one after the other. After `end` all have their fewest processes.
    """
    settings, order = session.settings, Random(seed)
    found: dict[tuple[int, float], list[Sample]] = {(i, 0.0): [] for i in range(equal)}
    found |= {(i, delay): [] for i, delay in enumerate(delays)}
    read = session.machine.gpu.read if session.machine.gpu else lambda: None
    for process in range(min(limit, settings.processes_max)):
        open_ = [key for key, samples in found.items() if undecided(samples, settings)]
        if not open_ or (process >= settings.processes_min and time.monotonic() > end):
            break
        names = [f"{i} {arm}" for i in sorted({i for i, _ in open_}) for arm in ("baseline", "candidate")]
        spec = session.spec(session.baseline, seed_offset=seed + process)
        starting = session.pool.start(dict.fromkeys(names, spec))
        for each in starting.values():
            each.setup.wait()
        arms = {name: each.arm for name, each in starting.items()}
        steady: dict[str, list[WarmUp]] = {name: [] for name in names}
        for i, delay in open_:
            both = {
                arm: Warm(arms[f"{i} {arm}"], slower, DELAYS.get(delay, 1), steady[f"{i} {arm}"])
                for arm, slower in (("baseline", 0.0), ("candidate", delay))
            }
            found[i, delay].append(measured := Sample())
            sample(both, settings, order, pairs, read, into=measured, enough=lambda taken: suffice(session, taken))
        for arm in arms.values():
            arm.close()
    for (_, delay), samples in found.items():
        yield {"delay": delay, **conclusion(session, samples)}


def suffice(session: Session, taken: Sample) -> bool:
    """`spread_of_processes.pairs_suffice`, without a profile and earlier comparisons."""
    ratios, settings = [pair.log_ratio for pair in taken.kept], session.settings
    step_us = median(pair.baseline.wall_s for pair in taken.kept) * 1e6
    spread = process_spread.expected([], kind(session), step_us)
    return settings.processes_max == 1 and statistics.blocks_suffice(ratios, settings.confidence, spread)


def undecided(samples: list[Sample], settings: MeasurementSettings) -> bool:
    """The protocol's rule of when to stop, but for its budget."""
    if len(samples) < settings.processes_min:
        return True
    interval = statistics.over_processes([s.log_ratio for s in samples], settings.confidence)
    return settings.processes_max > 1 and not statistics.precise_enough(interval, settings.half_width)


def conclusion(session: Session, samples: list[Sample]) -> dict[str, Any]:
    settings = session.settings
    ratios = [[p.log_ratio for p in s.kept] for s in samples]
    pairs = [pair for s in samples for pair in s.kept]
    step_us = median(pair.baseline.wall_s for pair in pairs) * 1e6
    spread = process_spread.expected([], kind(session), step_us) if len(samples) == 1 else None
    verdict, interval = statistics.verdict(ratios, settings.confidence, settings.min_effect, spread)
    estimate, low, high = interval.ratios()
    first, second = ([p.log_ratio for p in pairs if p.baseline_first is order] for order in (True, False))
    return {
        "verdict": str(verdict),
        "interval": [estimate, low, high],
        "log_ratios": [s.log_ratio for s in samples],
        "scatter": [stdev(process) for process in ratios],
        "step_us": step_us,
        "going_first": (median(first) - median(second)) / 2,
    }


def kind(session: Session) -> StepKind:
    """As nothing is profiled here, what is known of these workloads: eager steps of small models wait for the host."""
    if not session.machine.on_gpu:
        return StepKind.CPU
    eager = session.workload.name in ("mlp", "lenet5") and not session.baseline
    return StepKind.HOST_BOUND if eager else StepKind.DEVICE_BOUND


def measure(asked: argparse.Namespace) -> None:
    """Rounds of comparisons over all workloads in turn, kept after each."""
    kept, device, end = read(asked.store), choose_device(asked.device), time.monotonic() + asked.seconds
    kind, fixed = torch.device(device).type, [f"measurement={asked.preset}", *FIXED]
    for name in sorted(asked.workloads or WORKLOADS[kind], key=lambda name: len(of(kept, name, 0.0))) * 1000:
        if time.monotonic() > end:
            break
        settings = [*WORKLOADS[kind][name], f"device={kind}", *fixed]
        names = [s for s in settings if s.startswith("baseline=")]
        stack = {"cuda_graph": {}} if names else {}
        with tempfile.TemporaryDirectory() as folder, Progress() as progress:
            config = compose([s for s in settings if s not in names], {}, stack)
            session = Session(resolve(config), device, Path(folder), Stopwatch(), progress)
            with closing(session), placement.keep_off(session.machine.cores):
                seed = 10**6 * asked.seed + 1000 * len(kept)
                delays = (asked.delay * asked.delays)[: asked.delays]
                asking = asked.pairs, asked.processes, asked.equal, delays, end
                found = list(comparisons(session, seed, *asking))
            where = {"workload": name, "device": session.result.environment.get("gpu") or kind}
        kept += [where | facts for facts in found]
        asked.store.write_text(json.dumps(kept, indent=1) + "\n")
        print(f"{name}: {end - time.monotonic():.0f} s left", file=sys.stderr)


def read(store: Path) -> list[dict[str, Any]]:
    return json.loads(store.read_text()) if store.exists() else []


def of(kept: list[dict[str, Any]], workload: str | None, delay: float) -> list[dict[str, Any]]:
    return [facts for facts in kept if workload in (None, facts["workload"]) and facts["delay"] == delay]


def record(kept: Sequence[dict[str, Any]], device: str) -> Record:
    """Every comparison of the store, with what the tables show."""
    rows = [{**{key: row[key] for key in KEYS}, "processes": len(row["log_ratios"])} for row in kept]
    return Record("false_alarms", of_rows([row["device"] for row in kept], device), rows)


# --- beside other clocks -----------------------------------------------------------------------------------------


def clocks(device: torch.device) -> Iterator[dict[str, Any]]:
    """One kernel by our clock, by CUPTI (torch.profiler) and by triton.testing.do_bench: µs of a call."""
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(8192, 8192, device=device, generator=generator)
    large = torch.randn(16384, 16384, device=device, generator=generator)
    a = torch.randn(4096, 4096, device=device, generator=generator).bfloat16()
    wide = large[:8192, :8192].bfloat16()
    works: Mapping[str, Callable[[], object]] = {
        "GELU, 16384² float32": lambda: torch.nn.functional.gelu(large, approximate="tanh"),
        "GELU, 8192² float32": lambda: torch.nn.functional.gelu(x, approximate="tanh"),
        "GELU, 1024² float32": lambda: torch.nn.functional.gelu(x[:1024, :1024], approximate="tanh"),
        "matmul, 8192³ bfloat16": lambda: wide @ wide,
        "matmul, 4096³ bfloat16": lambda: a @ a,
        "matmul, 1024³ bfloat16": lambda: a[:1024, :1024] @ a[:1024, :1024],
    }
    size = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    flush = torch.empty(size, dtype=torch.uint8, device=device).zero_
    cold = {}
    for name, work in works.items():  # all of them before the first trace: leftover tracing slows the host
        clock.warm_up(work, device, 3.0)
        rounds = [(clock.time_cold_block(work, 100, device, flush).device_s or 0.0, bench(work)) for _ in range(5)]
        cold[name] = in_us(rounds)
    for name, work in works.items():
        step_s = median(clock.warm_up(work, device, 3.0))
        steps = max(20, round(0.02 / step_s))
        blocks = [(clock.time_block(work, steps, device), same_calls(work, 50, device)) for _ in range(9)]
        wall, on_device = in_us([(block.wall_s, block.device_s or 0.0) for block, _ in blocks])
        ours, cupti = in_us([both for _, both in blocks])
        emptied, theirs = cold[name]
        yield {
            "kernel": name,
            "wall": wall,
            "device": on_device,
            "cupti": cupti,
            "same_calls": ours,
            "cold": emptied,
            "do_bench": theirs,
        }


def bench(work: Callable[[], object]) -> float:
    """Seconds of a call, as Triton measures it: each finds an L2 cache that was emptied before."""
    from triton.testing import do_bench

    return float(do_bench(work, return_mode="median")) / 1e3


def in_us(rounds: Sequence[tuple[float, ...]]) -> list[float]:
    """The median of each of several figures that took turns, for the card's clocks move."""
    return [1e6 * median(figures) for figures in zip(*rounds, strict=True)]


def same_calls(work: Callable[[], object], calls: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a call by our clock, and of its kernels by CUPTI: of the same calls.

    The card's clocks move from one block to the next. Tracing puts 6 to 9 µs between two kernels.
    """
    from torch.autograd import DeviceType  # type: ignore[attr-defined]
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        ours = clock.time_block(work, calls, device)
    kernels = [event.time_range.elapsed_us() for event in found.events() if event.device_type == DeviceType.CUDA]
    assert len(kernels) in range(calls, 100 * calls, calls), f"{len(kernels)} kernels in {calls} calls"
    return ours.device_s or 0.0, sum(kernels) / calls / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="what was found so far; it is made where it is not there")
    parser.add_argument("--seconds", type=float, default=200, help="begin nothing more after these (0: only print)")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    parser.add_argument("--pairs", type=int, default=12, help="in each process")
    parser.add_argument("--processes", type=int, default=9, help="at most, where the interval is not narrow enough")
    parser.add_argument("--preset", default="default", help="of measurement=")
    parser.add_argument("--equal", type=int, default=7, help="comparisons with itself of a workload, side by side")
    parser.add_argument("--delays", type=int, default=7, help="beside them, comparisons with a delayed self")
    parser.add_argument("--delay", nargs="*", type=float, choices=DELAYS, default=list(DELAYS), help="in turn")
    parser.add_argument("--workloads", nargs="*", help="some of them only")
    parser.add_argument("--seed", type=int, default=0, help="another one for each store")
    parser.add_argument("--clocks", action="store_true", help="our clock beside CUPTI's and Triton's")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    asked = parser.parse_args()
    if asked.clocks:
        told(Record("clocks", here("cuda"), list(clocks(torch.device("cuda")))), "clock", asked.record)
        return
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    measure(asked)
    if kept := read(asked.store):
        device = torch.device(choose_device(asked.device)).type
        told(record(kept, device), BLOCKS.get((device, asked.preset), "false_alarms"), asked.record)


def told(found: Record, name: str, folder: Path | None) -> None:
    print(found.text())
    if folder:
        keep(found, name, folder)


if __name__ == "__main__":
    main()
