"""KernelBench's problem files at their own sizes: which verdict each reaches, and in what time.

    python tests/benchmarks/kernelbench.py FOLDER STORE.json [--levels 1 ...] [--only WORD ...] [--time]
        [--strategy fusion|identical] [--seconds 540] [--limit 170] [--reserve 60] [--workers 6] [--large 1.0]
        [--again VERDICT ...] [--record FOLDER] [-- OVERRIDE ...]

FOLDER is KernelBench's own (https://github.com/ScalingIntelligence/KernelBench), which holds level1, level2 and level3.
Each file is a job as `python -m optexp workload=module workload.path=FILE verify=only measurement=quick` (--time: it is
timed, too). Files with less than --large GiB of inputs and results share the card, --workers of them at a time;
larger ones have it alone. STORE.json is complete after each job, and a later run goes on with what is missing; no job
is started that may not end within --seconds. The table of all that is in the store is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from queue import Queue
from select import select
from threading import Lock
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from optexp.pages.blocks import keep
from optexp.pages.machine import of_rows
from optexp.pages.record import Record
from optexp.pages.rules import problem_sizes

ROOT = Path(__file__).parents[2]
GIB = 2**30
SERVE = "--serve"
MEMORY_NOTES = ("memory", "with one distinct batch")
CUT = "CUT"  # ended at the limit, without a verdict
FIXED = ["workload=module", "measurement=quick", "tracking.enabled=false", "environment.allow_foreign=true"]


@dataclass(frozen=True)
class Outcome:
    """The outcome of one job. seconds: of the whole command;  input_gib: 0 where it is not known before it runs."""

    file: str
    strategy: str
    verdict: str
    headline: str
    seconds: float
    input_gib: float = 0.0
    notes: tuple[str, ...] = ()
    device: str = ""

    @property
    def key(self) -> tuple[str, str]:
        return self.file, self.strategy


@dataclass
class Store:
    """A JSON list of outcomes, which several threads add to."""

    path: Path
    found: dict[tuple[str, str], Outcome] = field(default_factory=dict)
    lock: Lock = field(default_factory=Lock)

    def __post_init__(self) -> None:
        if self.path.exists():
            read = (Outcome(**{**facts, "notes": tuple(facts["notes"])}) for facts in json.loads(self.path.read_text()))
            self.found = {outcome.key: outcome for outcome in read}

    def add(self, outcome: Outcome) -> None:
        with self.lock:
            self.found[outcome.key] = outcome
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps([asdict(each) for each in self.found.values()], indent=1) + "\n")
            partial.replace(self.path)


def sizes(path: Path) -> tuple[int, int]:
    """Bytes of a file's inputs and of its results in float32, without any being made; 0 where that is not known."""
    spec = spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module, inputs, results = module_from_spec(spec), 0, 0
    try:
        spec.loader.exec_module(module)
        with torch.device("meta"), torch.no_grad():
            given = module.get_inputs()
            inputs = _bytes(given)
            results = _bytes(module.Model(*module.get_init_inputs())(*given))
    except Exception:  # which needs values: the job itself finds out
        pass
    return inputs, results


def _bytes(nest: object) -> int:
    return sum(leaf.numel() * max(4, leaf.itemsize) for leaf in tree_leaves(nest) if isinstance(leaf, Tensor))


def files(folder: Path, levels: Iterable[int], only: Sequence[str]) -> list[Path]:
    """In the order of their numbers. only: words of which a path must have one; none: all"""
    paths = (path for level in levels for path in sorted((folder / f"level{level}").glob("*.py"), key=number))
    return [path for path in paths if not only or any(word in f"{path.parent.name}/{path.name}" for word in only)]


def number(path: Path) -> int:
    return int(path.stem.partition("_")[0])


# --- one job after the other -------------------------------------------------------------------------------------


class Worker:
    """A process that compares what it is asked to: torch is imported once for all jobs. Replaced where it was ended."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def ask(self, job: Mapping[str, Any], limit_s: float) -> bool:
        """Whether the job is done within the limit; where it is not, it was ended."""
        process = self.process = self.process if self.process and self.process.poll() is None else started()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            if select([process.stdout], [], [], limit_s)[0] and process.stdout.readline():
                return True
        except BrokenPipeError:
            pass
        self.close()
        return False

    def close(self) -> None:
        """Its arms end with it."""
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.process = None


def started() -> subprocess.Popen[str]:
    paths = filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
    return subprocess.Popen(
        [sys.executable, __file__, SERVE],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip


def serve() -> None:
    """In a worker: a job a line, and a line for each that is done. What jobs print goes to stderr."""
    from optexp import api
    from optexp.comparison import runner
    from optexp.workers import launching

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    launching.launcher()
    for line in sys.stdin:
        job = json.loads(line)
        config = api.compose(job["overrides"], api.members(job["strategy"]), {})
        runner.run(config, Path(job["folder"]), show=lambda *_: None)
        answers.write("done\n")


def run(worker: Worker, path: Path, options: argparse.Namespace, limit_s: float, input_gib: float) -> Outcome:
    """One comparison; ended with all its processes at the limit."""
    name, began = f"{path.parent.name}/{path.name}", time.monotonic()
    identical = {"replace": {"target": f"{path}:Model"}}
    strategy = identical if options.strategy == "identical" else options.strategy
    overrides = [*FIXED, f"workload.path='{path}'", *([] if options.time else ["verify=only"]), *options.overrides]
    with tempfile.TemporaryDirectory(prefix="kernelbench-") as folder:
        job = {"overrides": overrides, "strategy": strategy, "folder": folder}
        done = worker.ask(job, limit_s)
        seconds = round(time.monotonic() - began, 1)
        record = Path(folder) / "result.json"
        if done and record.exists():
            facts = json.loads(record.read_text())
            notes = tuple(note for note in facts.get("notes", ()) if note.startswith(MEMORY_NOTES))
            told, card = (facts["verdict"], facts["headline"]), str(facts["environment"].get("gpu") or facts["device"])
            return Outcome(name, options.strategy, *told, seconds, input_gib, notes, card)
    late = seconds >= limit_s
    said = f"no verdict within {limit_s:.0f} s" if late else "the process that compares ended without a record"
    return Outcome(name, options.strategy, CUT if late else "ERROR", said, seconds, input_gib)


# --- all of them -------------------------------------------------------------------------------------------------


def work(options: argparse.Namespace, store: Store) -> None:
    """Run missing files: first those that share the card, then one after the other."""
    end = time.monotonic() + options.seconds
    again = {key for key, outcome in store.found.items() if outcome.verdict in options.again}
    missing = [
        path
        for path in files(options.folder, options.levels, options.only)
        if (key := (f"{path.parent.name}/{path.name}", options.strategy)) not in store.found or key in again
    ]
    known = {path: sizes(path) for path in missing}
    alone = [path for path in missing if sum(known[path]) >= options.large * GIB]

    workers = [Worker() for _ in range(max(1, options.workers))]
    idle = Queue[Worker]()
    for worker in workers:
        idle.put(worker)

    def job(path: Path) -> None:
        left_s = end - time.monotonic()
        if left_s < min(options.limit, options.reserve):
            return
        worker = idle.get()
        try:
            outcome = run(worker, path, options, min(options.limit, left_s), round(known[path][0] / GIB, 2))
        finally:
            idle.put(worker)
        if outcome.verdict == CUT and left_s < options.limit:
            return  # for want of time: it is not known what it ends in
        store.add(outcome)
        print(f"{outcome.seconds:6.1f} s  {outcome.file}: {outcome.headline or outcome.verdict}", flush=True)

    try:
        with ThreadPoolExecutor(options.workers) as pool:
            list(pool.map(job, [path for path in missing if path not in alone]))
        for worker in workers[1:]:
            worker.close()
        while not idle.empty():
            idle.get()
        idle.put(workers[0])
        for path in alone:
            job(path)
    finally:
        for worker in workers:
            worker.close()


def table(outcomes: Iterable[Outcome]) -> str:
    """Markdown: a row for each file, and how many ended in what."""
    rows = sorted(outcomes, key=lambda each: (each.strategy, each.file.partition("/")[0], number(Path(each.file))))
    counts = Counter((each.strategy, each.verdict) for each in rows)
    said = [f"{strategy}: {verdict} {count}" for (strategy, verdict), count in sorted(counts.items())]
    lines = ["| file | inputs [GiB] | strategy | verdict | seconds | |", "|---|---:|---|---|---:|---|"]
    for each in rows:
        told = "; ".join([each.headline.partition(": ")[2], *each.notes]) if each.verdict != "VERIFIED" else ""
        told = told or "; ".join(each.notes)
        cells = each.file, f"{each.input_gib:g}", each.strategy, each.verdict, f"{each.seconds:.0f}", told[:300]
        lines.append(f"| {' | '.join(cell.replace('|', '¦') for cell in cells)} |")
    return "\n".join([*lines, "", "; ".join(said), ""])


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; overrides of a job follow `--`."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--levels", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--strategy", default="fusion")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--limit", type=float, default=170.0)
    parser.add_argument("--reserve", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=6)
    parser.add_argument("--large", type=float, default=1.0)
    parser.add_argument("--time", action="store_true")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    parser.add_argument("--again", nargs="+", default=[])
    options = parser.parse_args(arguments[:at])
    options.folder, options.overrides = options.folder.resolve(), list(arguments[at + 1 :])
    return options


def main() -> None:
    if sys.argv[1:] == [SERVE]:
        serve()
        return
    options = parse(sys.argv[1:])
    store = Store(options.store.resolve())
    work(options, store)
    print(table(store.found.values()))
    if options.record:
        rows = [{key: asdict(outcome)[key] for key in problem_sizes.KEYS} for outcome in store.found.values()]
        machine = of_rows([outcome.device for outcome in store.found.values()], "cuda")
        keep(Record("problem_sizes", machine, rows), "kernelbench_level1", options.record)


if __name__ == "__main__":
    main()
