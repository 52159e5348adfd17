"""How often the verdict is wrong about honest programs: pairs of a program and a strategy, verified side by side.

    python tests/benchmarks/honest.py STORE.json [--half a|b] [--seconds 500] [--workers 2] [--device cuda]
                                      [--kernelbench FOLDER] [--only WORD ...] [--record FOLDER]
    python tests/benchmarks/honest.py STORE.json --seeds 300    mlp, lenet5 and bert × fusion, each on so many seeds

A pair is `verify=only` of the default preset, in a comparison's own processes; nothing is timed, so pairs share cores
and card. STORE.json keeps each verdict: a later run goes on with what is missing, and every run prints Markdown tables
of all that is in the store. Pairs fall into two halves by the hash of their name. Half a serves to set constants; half
b is run once, after they are fixed, and its pairs are never run again (--again is for half a): begin a store as a copy
of experiments/results/data/verdicts.json.

A false alarm is NOT_EQUIVALENT, INVALID or ERROR. UNSUPPORTED and NOT_ENGAGED are no alarms and no decisions: they are
counted apart, unless the verification itself failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from math import inf, isfinite
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from threading import Lock
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # of a checkout

from optexp.pages.blocks import keep  # noqa: E402
from optexp.pages.record import Record  # noqa: E402
from optexp.pages.rules.honest import CUT, SKIPPED, Found  # noqa: E402
from tests.benchmarks.honest_pairs import Pair, imported, pairs  # noqa: E402

FIXED = ("verify=only", "tracking.enabled=false", "environment.allow_foreign=true")
PLAIN_S = 0.2  # of one eager call of a scaled problem: what takes longer is too large for a CPU
SEEDS = -1  # in place of a record's seed, where it stands for many


@dataclass
class Store:
    """A JSON list that several threads add to; it is complete after each pair. It may begin as a page's record."""

    path: Path
    found: list[Found] = field(default_factory=list)
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        if self.path.exists():
            held = json.loads(self.path.read_text())
            rows = held if isinstance(held, list) else Record.read(self.path).rows
            self.found = [Found(**facts) for facts in rows]

    def of(self, id: str, device: str, seed: int) -> list[Found]:
        """The outcome of a pair: one or none."""
        return [one for one in self.found if (one.id, kind(one.device), one.seed) == (id, device, seed)]

    def add(self, new: Found) -> None:
        with self.lock:
            same = (new.id, kind(new.device), new.seed)
            self.found = [one for one in self.found if (one.id, kind(one.device), one.seed) != same] + [new]
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps([asdict(one) for one in self.found], indent=1, ensure_ascii=False) + "\n")
            partial.replace(self.path)


def kind(device: str) -> str:
    return "cpu" if device == "cpu" else "cuda"


# --- in a worker -----------------------------------------------------------------------------------------------


def serve(connection: Connection, cores: Sequence[int]) -> None:
    """Answer with what pairs end in, in a session of its own: one launcher imports torch for all of them."""
    os.setsid()
    os.sched_setaffinity(0, cores)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  # progress of several comparisons at once
    while True:
        try:
            pair, settings, max_gib = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        connection.send(ended_in(pair, settings, max_gib))


def ended_in(pair: Pair, settings: Sequence[str], max_gib: float = inf) -> dict[str, Any]:
    """Verdict, headline and figures of one comparison."""
    from optexp import api
    from optexp.comparison import runner
    from optexp.errors import ConfigError

    if reason := unfit(pair, settings, max_gib):
        return {"verdict": SKIPPED, "headline": reason}
    stack = {} if pair.strategy == "baseline" else {pair.strategy: dict(pair.options)}
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = api.compose([*pair.overrides, *FIXED, *settings], stack, {})
        except ConfigError as mistake:
            return {"verdict": "ERROR", "headline": f"ERROR: {mistake}"}
        result = runner.run(config, Path(folder), show=lambda *_: None)
    checked = result.equivalence
    worst = checked.worst if checked else None
    return {
        "verdict": str(result.verdict),
        "headline": result.headline,
        "ok": checked.ok if checked else None,
        "used": worst.used if worst and isfinite(worst.used) else None,
        "worst": f"{worst.gate} {worst.tensor}" if worst else "",
        "device": str(result.environment.get("gpu") or "cpu"),
    }


def unfit(pair: Pair, settings: Sequence[str], max_gib: float) -> str:
    """Why a problem of KernelBench cannot be run here; empty where it can."""
    path = next((o.partition("=")[2] for o in pair.overrides if o.startswith("workload.path=")), None)
    if path is None or not pair.program.startswith("KernelBench"):
        return ""
    import torch

    try:
        module = imported(Path(path))
        if "device=cpu" not in settings:
            with torch.device("meta"):
                total = sum(t.nbytes for t in module.get_inputs() if isinstance(t, torch.Tensor))
            return f"inputs of {total / 2**30:.1f} GiB" if total > max_gib * 2**30 else ""
        with torch.no_grad():
            model, inputs = module.Model(*module.get_init_inputs()).eval(), module.get_inputs()
            begin = time.monotonic()
            model(*inputs)
        seconds = time.monotonic() - begin
        return f"{seconds:.1f} s a call" if seconds > PLAIN_S else ""
    except Exception as error:
        return f"does not run at this size: {type(error).__name__}: {str(error).splitlines()[:1]}"


# --- workers side by side --------------------------------------------------------------------------------------


@dataclass
class Desk:
    """A worker process that is replaced when it hangs or dies."""

    cores: Sequence[int]
    process: BaseProcess | None = None
    connection: Connection | None = None
    max_gib: float = inf

    def ask(self, pair: Pair, settings: Sequence[str], limit_s: float) -> dict[str, Any]:
        if self.process is None or not self.process.is_alive():
            self.connection, theirs = get_context("spawn").Pipe()
            self.process = get_context("spawn").Process(target=serve, args=(theirs, self.cores))
            self.process.start()
            theirs.close()
        assert self.connection is not None
        try:
            self.connection.send((pair, settings, self.max_gib))
            if self.connection.poll(limit_s):
                answer: dict[str, Any] = self.connection.recv()
                return answer
            self.end()
            return {"verdict": CUT, "headline": f"no verdict within {limit_s:g} s"}
        except (EOFError, OSError):
            self.end()
            return {"verdict": "ERROR", "headline": "ERROR: the comparison's own process ended"}

    def end(self) -> None:
        """Kill the worker; its launcher and arms end with it."""
        if self.process is not None and self.process.pid is not None:
            try:
                os.killpg(self.process.pid, signal.SIGKILL)
            except ProcessLookupError:
                self.process.kill()
            self.process.join()
        self.process = None


def run(asked: argparse.Namespace, store: Store, scratch: Path) -> None:
    """Run the pairs that the store lacks, cheap ones first, until the time is over."""
    end, commit, torch = time.monotonic() + asked.seconds, described(), version()
    wanted = [
        pair
        for pair in pairs(asked.device, asked.kernelbench, scratch)
        if (asked.half in (None, pair.half))
        and (not asked.only or any(re.search(word, pair.id) for word in asked.only))
        and (not store.of(pair.id, asked.device, asked.seed) or (asked.again and pair.half == "a"))
    ]
    shared = sorted(os.sched_getaffinity(0))
    desks = [Desk(cores_of(shared, number, asked), max_gib=asked.max_gib) for number in range(asked.workers)]
    free, lock, left = list(desks), Lock(), Counter(wanted=len(wanted))

    def one(pair: Pair) -> None:
        remaining = end - time.monotonic()
        if remaining < 5:
            return
        with lock:
            desk = free.pop()
        begin = time.monotonic()
        settings = (f"device={asked.device}", f"seed={asked.seed}", *asked.set)
        answer = desk.ask(pair, settings, min(asked.limit, remaining))
        with lock:
            free.append(desk)
            left["done"] += 1
        cut_short = answer["verdict"] == CUT and remaining < asked.limit
        seconds = round(time.monotonic() - begin, 1)
        facts = {"device": asked.device, "seconds": seconds, "seed": asked.seed, "torch": torch, "commit": commit}
        found = Found(id=pair.id, half=pair.half, **{**facts, **answer})
        if not cut_short:  # by the end of this run: the next one begins it anew
            store.add(found)
        mark = "!" if found.alarm else "?" if found.verdict in ("UNVERIFIED", CUT) else " "
        told = found.headline if mark != " " else found.verdict
        print(
            f"{mark} {left['done']}/{left['wanted']} {pair.id}: {told} ({seconds:.0f} s)", file=sys.stderr, flush=True
        )

    try:
        with ThreadPoolExecutor(asked.workers) as pool:
            list(pool.map(one, wanted))
    finally:
        for desk in desks:
            desk.end()


def cores_of(shared: Sequence[int], number: int, asked: argparse.Namespace) -> Sequence[int]:
    """On a CPU each worker has cores of its own; on a GPU each comparison claims one for itself."""
    if asked.device != "cpu" or asked.workers > len(shared):
        return shared
    return shared[number :: asked.workers]


def described() -> str:
    """The commit, marked where the working tree differs from it."""
    told = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return told.stdout.strip()


def version() -> str:
    from importlib.metadata import version

    return version("torch")


# --- many seeds of one pair ------------------------------------------------------------------------------------


def seeds(asked: argparse.Namespace, store: Store) -> None:
    """Compile once, then verify on many seeds: an alarm in a hundred is one too many where it is everybody's first."""
    from tests.benchmarks.honest_seeds import PAIRS, count

    commit, torch = described(), version()
    for name in PAIRS:
        if asked.only and not any(re.search(word, name) for word in asked.only):
            continue
        known = [] if asked.again else store.of(name, asked.device, SEEDS)
        before = known[0] if known else Found(name, "seeds", asked.device, "", "", seed=SEEDS)
        if before.seeds >= asked.seeds:
            continue
        begin, first = time.monotonic(), 1 + before.seeds
        new = count(name, asked.device, first, asked.seeds - before.seeds, asked.seconds)
        total, alarms = before.seeds + new.seeds, before.alarms + new.alarms
        told = [f"{alarms} of {total} seeds refused", *before.headline.split("; ")[1:], *new.headlines]
        seconds = before.seconds + round(time.monotonic() - begin, 1)
        used, worst = max((before.used or 0.0, before.worst), (new.used, new.worst))
        verdict = "NOT_EQUIVALENT" if alarms else "VERIFIED"
        counted = replace(before, verdict=verdict, headline="; ".join(told[:6]), ok=not alarms, seconds=seconds)
        store.add(replace(counted, used=used, worst=worst, seeds=total, alarms=alarms, torch=torch, commit=commit))
        print(f"{name}: {told[0]} ({seconds:.0f} s)", file=sys.stderr, flush=True)


# --- records -----------------------------------------------------------------------------------------------------


def records(found: Sequence[Found]) -> dict[str, Record]:
    """Of all pairs that fit, and of pairs on many seeds; rows name their device."""
    many = [one for one in found if one.half == "seeds"]
    fit = [one for one in found if one not in many and one.verdict != SKIPPED]
    parts = {"verdicts": fit, "verdicts.seeds": many}
    return {name: Record("honest", "", [asdict(one.brief()) for one in rows]) for name, rows in parts.items() if rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path, help="what was found so far; it is made where it is not there")
    parser.add_argument("--seconds", type=float, default=500, help="begin nothing more after these (0: only print)")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--workers", type=int, default=2, help="comparisons side by side")
    parser.add_argument("--half", choices=("a", "b"), help="one of the two only")
    parser.add_argument("--kernelbench", type=Path, help="the folder with level1, level2 and level3")
    parser.add_argument("--max-gib", type=float, default=0.5, help="of inputs of a problem on a GPU that workers share")
    parser.add_argument("--only", nargs="*", metavar="WORD", help="regular expressions: pairs that match one")
    parser.add_argument("--limit", type=float, default=180, help="seconds of one pair")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=0, help="of three pairs with fusion, instead of all pairs")
    parser.add_argument("--again", action="store_true", help="replace what the store has of half a")
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="more settings of every comparison")
    parser.add_argument("--list", action="store_true", help="print the pairs, run none")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    asked = parser.parse_args()
    asked.store = asked.store.resolve()
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    store = Store(asked.store)
    with tempfile.TemporaryDirectory() as scratch:
        if asked.list:
            for pair in pairs(asked.device, asked.kernelbench, Path(scratch)):
                print(pair.half, pair.id)
            return
        if asked.seeds:
            seeds(asked, store)
        elif asked.seconds:
            run(asked, store, Path(scratch))
    for name, record in records(store.found).items():
        print(f"\n{record.text()}")
        if asked.record:
            keep(record, name, asked.record)


if __name__ == "__main__":
    main()
