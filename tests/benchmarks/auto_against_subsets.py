"""mode=auto beside brute force: all 16 subsets of four strategies, and what the search finds among the same four.

    python tests/benchmarks/auto_against_subsets.py STORE.json [--only NAME ...] [--cases FOLDER] [--seconds 540]
        [--trials 8] [--budget 240] [--again VERDICT ...] [--record FOLDER] [-- OVERRIDE ...]

The search comes first: a job as `python -m optexp ... measurement=quick`, which may make --trials trials in --budget
seconds. Each subset is such a job, too. Last, the search's winner is compared with the best subset directly, so that
the ratio is of one run. The empty subset is 1× by definition.

STORE.json is complete after each job, and a later run goes on with what is missing. Several runs may share it, each on
its own device (`-- device=cuda:1`). No job starts after --seconds, and no search that may not end by then. --again
INVALID repeats the jobs that ended so. --seconds 0
prints what is there. A job is known by subject, kind and stack alone:
use another store for other overrides and for another kind of device.

--cases is a folder with two files of users, unet_softmax.py and gpt_accumulation.py.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path
from shutil import copy

sys.path.insert(0, str(Path(__file__).parents[2]))  # of a checkout

import torch

from optexp import api
from optexp.comparison import runner
from optexp.pages.blocks import keep
from optexp.pages.machine import of_rows
from optexp.pages.record import Record
from optexp.pages.rules import subsets
from optexp.pages.rules.subsets import AUTO, DIRECT, SUBSET, Job, same
from optexp.records import filenames
from optexp.result import Result, Verdict
from optexp.workers import launching
from tests.benchmarks.kept import Kept, keep_if_beyond

QUICK = ["measurement=quick", "measurement.process_s=2", "measurement.warmup_s=1", "profile.details=false"]
FIXED = [*QUICK, "tracking.enabled=false", "environment.allow_foreign=true", "patch=faster"]
ERROR = str(Verdict.ERROR)


@dataclass(frozen=True)
class Subject:
    """A program, and the four strategies whose subsets are tried."""

    name: str
    overrides: tuple[str, ...]
    strategies: tuple[str, str, str, str]

    def subsets(self) -> Iterator[str]:
        """The 15 that are not empty, small ones first, as labels."""
        for size in range(1, len(self.strategies) + 1):
            for members in combinations(self.strategies, size):
                yield "+".join(members)


INFERENCE = ("fusion", "amp", "cuda_graph")


def subjects(cases: Path | None) -> list[Subject]:
    """All of them; without the files of users where no folder has them."""
    bert, train = ("workload=bert", "workload.mode=forward"), "workload.mode=train"
    learning = (*INFERENCE, "fused_optimizer")
    found = [
        Subject("mlp", ("workload=mlp",), (*INFERENCE, "inplace")),
        Subject("lenet5", ("workload=lenet5", train), learning),
        Subject("vision", ("workload=vision",), (*INFERENCE, "channels_last")),
        Subject("bert_1x128", (*bert, "workload.batch_size=1", "workload.sequence=128"), (*INFERENCE, "tf32")),
        Subject("bert_16x512", (*bert, "workload.batch_size=16", "workload.sequence=512"), (*INFERENCE, "tf32")),
    ]
    if cases is not None:
        unet, gpt = (f"workload.path={cases.resolve() / file}.py" for file in ("unet_softmax", "gpt_accumulation"))
        found.append(Subject("unet_softmax", ("workload=module", unet), (*INFERENCE, "channels_last")))
        found.append(Subject("gpt_accumulation", ("workload=module", gpt, train), learning))
    return found


def kept(store: Path) -> Kept[Job]:
    return Kept(store, Job)


def read(store: Path) -> dict[Hashable, Job]:
    return kept(store).rows()


def forget(store: Path, verdicts: Sequence[str], names: Sequence[str]) -> None:
    """Remove jobs of these subjects that ended in one of these verdicts, and comparisons with their winners."""
    if verdicts:
        with kept(store).alone():
            jobs = read(store).values()
            gone = {job.key for job in jobs if job.verdict in verdicts and job.subject in names}
            searched = {job.subject for job in jobs if job.key in gone and job.kind == AUTO}
            gone |= {job.key for job in jobs if job.kind == DIRECT and job.subject in searched}
            kept(store).write(job for job in jobs if job.key not in gone)


# --- jobs ----------------------------------------------------------------------------------------------------------


def run(subject: Subject, kind: str, stack: str, against: str, options: argparse.Namespace) -> Job:
    """One job in this process, as a job of a sweep: the launcher and its imports serve all of them."""
    began = time.monotonic()
    asked = [*FIXED, *subject.overrides, *options.overrides]
    if kind == AUTO:
        among = f"auto.among=[{','.join(subject.strategies)}]"
        asked += ["mode=auto", among, f"auto.trials={options.trials or 'null'}", f"auto.budget={options.budget}"]
    with tempfile.TemporaryDirectory(prefix="subsets-") as folder:
        candidate = "" if kind == AUTO else stack
        config = api.compose(asked, api.members(candidate), api.members(against))
        result = runner.run(config, Path(folder), show=lambda *_: None)
        keep_if_beyond(result, Path(folder), options.store.with_suffix(".beyond") / f"{subject.name}_{stack}")
        if kind == AUTO:  # its trials and first looks tell why this winner was chosen
            searches = options.store.with_suffix(".searches")
            searches.mkdir(parents=True, exist_ok=True)
            copy(Path(folder) / filenames.RESULT, searches / f"{subject.name}.json")
    return of_result(result, subject.name, kind, stack, against, round(time.monotonic() - began, 1))


def of_result(result: Result, subject: str, kind: str, stack: str, against: str, seconds: float) -> Job:
    measured = result.speedup if result.verdict.measured else None
    figures = (measured.estimate, measured.low, measured.high) if measured else (None, None, None)
    winner = "+".join(result.search.stack) if result.search else ""
    bound = result.profile.prediction
    predicted = bound.prediction.speedup if bound else None
    facts = str(result.verdict), *figures, seconds, result.headline, str(result.environment.get("gpu") or "CPU")
    return Job(subject, kind, stack, against, *facts, winner=winner, trials=len(result.trials), predicted=predicted)


def missing(subject: Subject, found: Mapping[Hashable, Job]) -> list[tuple[str, str, str]]:
    """Kind, stack and baseline of the subject's next jobs, in their order."""
    among = "+".join(subject.strategies)
    untried = [(SUBSET, stack, "") for stack in subject.subsets() if (subject.name, SUBSET, stack, "") not in found]
    auto = found.get((subject.name, AUTO, among, ""))
    if auto is None:
        return [(AUTO, among, ""), *untried]
    if untried or auto.verdict == ERROR:  # which has no winner to compare
        return untried
    strongest = best(subject, found)
    direct = (DIRECT, auto.winner, strongest)
    return [] if same(auto.winner, strongest) or (subject.name, *direct) in found else [direct]


def best(subject: Subject, found: Mapping[Hashable, Job]) -> str:
    """The FASTER subset with the largest estimate; the empty one where none is FASTER."""
    return subsets.best([job for job in found.values() if job.subject == subject.name])


def work(options: argparse.Namespace) -> None:
    """Every missing job of the chosen subjects, until the time is over."""
    end = time.monotonic() + options.seconds
    forget(options.store, options.again, [subject.name for subject in chosen(options)])
    for subject in chosen(options):
        while following := missing(subject, read(options.store)):
            left = end - time.monotonic()
            fits = [each for each in following if left > (options.budget if each[0] == AUTO else 0)]
            if not fits:
                print(f"{subject.name}: no time for {following[0][0]}: run the command again to go on", flush=True)
                break
            job = run(subject, *fits[0], options)
            kept(options.store).add(job)
            beside = f" against {job.against}" if job.against else ""
            print(f"{job.seconds:6.1f} s  {job.subject}, {job.kind} {job.stack}{beside}: {job.headline}", flush=True)


# --- records -----------------------------------------------------------------------------------------------------


def records(found: Mapping[Hashable, Job], machine: str) -> dict[str, Record]:
    """Of the pages that show these jobs, by name."""
    jobs = list(found.values())
    bounds = [
        {
            "workload": job.subject,
            "strategy": job.stack,
            "verdict": job.verdict,
            "measured": job.speedup,
            "predicted": job.predicted,
        }
        for job in jobs
        if job.kind == SUBSET and job.speedup is not None
    ]
    return {
        "search": Record("subsets", machine, [asdict(job) for job in jobs]),
        "bounds.subsets": Record("bounds", machine, bounds),
    }


def chosen(options: argparse.Namespace) -> list[Subject]:
    known = subjects(options.cases)
    names = [subject.name for subject in known]
    if unknown := set(options.only) - set(names):
        sys.exit(f"--only {' '.join(sorted(unknown))}: known are {', '.join(names)} (two need --cases)")
    return [subject for subject in known if subject.name in (options.only or names)]


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options; overrides of every job follow `--`."""
    at = list(arguments).index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--only", nargs="+", default=[])
    parser.add_argument("--cases", type=Path)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--trials", type=int, default=8, help="of the search, at most; 0: as its budget allows")
    parser.add_argument("--budget", type=float, default=240.0, help="of the search, in seconds")
    parser.add_argument("--again", nargs="+", default=[])
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    options = parser.parse_args(arguments[:at])
    options.store, options.overrides = options.store.resolve(), list(arguments[at + 1 :])
    return options


def main() -> None:
    options = parse(sys.argv[1:])
    if options.seconds:
        launching.launcher()
        work(options)
    device = "cpu" if "device=cpu" in options.overrides or not torch.cuda.is_available() else "cuda"
    rows = read(options.store)
    for name, record in records(rows, of_rows([job.device for job in rows.values()], device)).items():
        print(f"\n{name}\n\n{record.text()}")
        if options.record:
            keep(record, name, options.record)


if __name__ == "__main__":
    main()
