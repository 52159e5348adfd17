"""All that experiments/results/ records, measured again: one job after another, each with a limit and a log.

    python tests/benchmarks/everything.py FOLDER [GROUP or JOB ...] [--within SECONDS] [--list]
    python tests/benchmarks/everything.py FOLDER --records

Nothing else may use the card. A job whose log is in FOLDER is not run again, so that the whole may be made in several
runs; what was cut off is. Two runs share a FOLDER, each with a card of its own (CUDA_VISIBLE_DEVICES=0 and 1): a job
that one of them runs is left out by the other. KERNELBENCH and CASES name the folders of KernelBench's problems and of
two files of users, unet_softmax.py and gpt_accumulation.py. --records writes what is done so far into FOLDER/records, a
small file for each block of a page; `results.py put FOLDER/records/*.json` takes these into experiments/results.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))  # of a checkout

from optexp.pages.blocks import keep  # noqa: E402

DONE, FAILED, CUT = "done", "exit status", "cut off"  # what the log of a job ends with
RECORDS = "records"  # folder of FOLDER
START_S, COMPARISON_S, COMPILED_S, PROFILE_S = 8.0, 7.0, 8.0, 4.0  # estimates: of a command, and of what it consists of


@dataclass(frozen=True)
class Job:
    """A command, what follows its Python, and the seconds it may take.

    command: {} is a folder of its own, {folder} that of all, {records} that of records; $NAME is of the environment
    about_s: an estimate, from the number of its comparisons; 0: its limit
    """

    name: str
    limit_s: float
    command: str
    about_s: float = 0.0

    @property
    def seconds(self) -> float:
        """About how long it takes."""
        return self.about_s or self.limit_s

    def arguments(self, folder: Path) -> list[str]:
        """Of Python."""
        places = {"{}": folder / self.name, "{folder}": folder, "{records}": folder / RECORDS}
        filled = reduce(lambda text, mark: text.replace(mark, str(places[mark])), places, self.command)
        return shlex.split(os.path.expandvars(filled))

    @property
    def lacks(self) -> str:
        """A variable that the command needs and the environment does not have; empty where it has all."""
        return next((name for name in re.findall(r"\$(\w+)", self.command) if name not in os.environ), "")


def job(name: str, limit_s: float, arguments: str, comparisons: int = 1, profiles: int = 0, compiled: int = 0) -> Job:
    """One comparison, or a sweep of them.

    comparisons, profiles: of the sweep;  compiled: those that torch.compile takes part in
    """
    place = "hydra.sweep.dir={}" if "-m " in arguments or "experiments=" in arguments else "hydra.run.dir={}"
    about_s = START_S + COMPARISON_S * comparisons + PROFILE_S * profiles + COMPILED_S * compiled
    return Job(name, limit_s, f"-m optexp {arguments} {place}", about_s)


def study(name: str, comparisons: int = 0, profiles: int = 0, compiled: int = 0, more: str = "") -> Job:
    """A study with brief settings."""
    return job(name, 300, f"experiments={name} {more} {BRIEF}", comparisons, profiles, compiled)


def gpu_tests(name: str, limit_s: float, arguments: str, processes: int = 6, slow: bool = False) -> Job:
    marks = "gpu and slow" if slow else "gpu and not slow"
    tell = "-q --tb=short -p tests.benchmarks.telling -p no:benchmark -o faulthandler_timeout=90 --junitxml={}.xml"
    return Job(name, limit_s, f"-m pytest {tell} -m '{marks}' -n {processes} -o cache_dir={{}} {arguments}")


BENCHMARKS = "tests/benchmarks"
KEEP = "--record {records}"
GAINS = "tests/strategies/test_gains_on_gpu.py"
MEASURE = (
    "tests/measurement",
    "tests/test_end_to_end_on_gpu.py",
    "tests/profiling",
)  # nothing may run beside
APART = ("tests/kernels", "tests/cheats", "tests/strategies", *MEASURE)
VERDICTS = f"{BENCHMARKS}/every_verdict.py {{folder}}/verdicts.json"
SUBSETS = f"{BENCHMARKS}/auto_against_subsets.py {{folder}}/subsets.json"
OTHERS = "add matmul cdist linear_gelu vision causal_lm sleep graph_break changing_shapes workspace pipeline"
ADAMW = "amp,fusion,cuda_graph,fused_optimizer,compiled_optimizer"
LENET = "workload=lenet5 workload.mode=train"
BRIEF = "measurement=quick measurement.process_s=1 measurement.warmup_s=0.5 profile.details=false"
SEEDS = "replay=benchmarks verify=only measurement.verification_seeds=20"
SCRIPT = "workload.batch_size=128 workload.source=host measurement.cpus=all"  # as a script that nobody bound to a core
WIDE = f"workload=mlp workload.mode=train {SCRIPT} workload.style=linear workload.in_features=3072 workload.dim=1024"
WIDE += " workload.layers=3 workload.out_features=10"
CAPTURED = "pinned_memory+cuda_graph,pinned_memory+prefetch+cuda_graph,pinned_memory+prefetch+fusion+cuda_graph"
LOWER = "amp+pinned_memory+cuda_graph,amp+pinned_memory+fusion+fused_optimizer+cuda_graph"
RESNET = "workload=vision workload.mode=train workload.batch_size=32 workload.source=host"
TOKENS = "workload=bert workload.batch_size=1 workload.sequence=128 dtype=bfloat16"

GROUPS: dict[str, list[Job]] = {
    "main": [
        job("main_graph", 150, "workload=mlp strategy=cuda_graph", 8),
        job("main_unbound", 150, "workload=mlp strategy=cuda_graph measurement.cpus=all", 8),
        job("main_fusion_graph", 150, "workload=mlp strategy=fusion+cuda_graph", 8, 0, 1),
        job("main_gelu", 150, "workload=gelu strategy=fusion", 8, 0, 1),
    ],
    "studies": [
        study("gelu_five_ways", 8, 0, 2, "workload.size=8192"),
        study("elementwise", 8, 0, 2),
        study("graph_by_kernel_count", 7),
        study("mlp_stacks", 8, 0, 4),
        study("mlp_batch_sizes", 3, 0, 3),
        study("lenet_compile", 3, 0, 3),
        study("overlap_chunks", 2, 8),
        study("training_loop", 7, 14),  # and its loader's workers start
        study("matmul_scaling", 0, 12),
        study("mlp_scaling", 0, 13),
        study("operator_profiles", 0, 6),
        study("launch_configuration", 0, 19),
        study("bert_profile", 0, 12),
    ],
    "stacks": [
        job("stacks_lenet", 200, f"-m {LENET} {SCRIPT} strategy={CAPTURED} {BRIEF}", 3, 0, 1),
        job("stacks_wide", 200, f"-m {WIDE} strategy={LOWER} {BRIEF}", 2, 0, 1),
        job("stacks_resnet", 200, f"{RESNET} strategy=amp+fusion+cuda_graph+pinned_memory {BRIEF}", 3, 0, 4),
        job("stacks_tokens", 200, f"-m {TOKENS} strategy=cuda_graph,fusion+cuda_graph {BRIEF}", 2, 0, 3),
        job("stacks_bert", 300, f"-m workload=bert workload.mode=train strategy=fusion,cuda_graph {BRIEF}", 4, 0, 3),
        job("stacks_branches", 150, "workload=branches workload.batch_size=64 workload.layers=8"
            f" strategy=streams+cuda_graph 'baseline=[cuda_graph]' {BRIEF}"),
        job("stacks_matmul", 150, f"workload=matmul strategy=tf32 {BRIEF}"),
        job("stacks_pipeline", 150, f"workload=pipeline strategy=streams+pinned_memory {BRIEF}", 2),
        job("stacks_affinity", 150, f"workload=mlp measurement.cpus=all strategy=cpu_affinity {BRIEF}"),
    ],
    "tests": [
        gpu_tests("tests_core", 150, "tests " + " ".join(f"--ignore={path}" for path in APART)),
        gpu_tests("tests_measure", 150, " ".join(MEASURE), processes=0),
        gpu_tests("tests_cheats", 300, "tests/cheats", processes=4),
        gpu_tests("tests_strategies", 200, "tests/strategies"),
        gpu_tests("tests_kernels", 300, "tests/kernels"),
        gpu_tests("tests_slow", 300, f"tests --ignore={GAINS}", processes=4, slow=True),
        gpu_tests("tests_gains", 400, f"-s {GAINS}", processes=0, slow=True),
    ],
    "strategies": [
        Job("pairs", 400, f"{BENCHMARKS}/pairs.py run {{}} 5"),
        *(
            Job(f"verdicts_{name}", 560, f"{VERDICTS} --only {workloads} --seconds 500 {KEEP}", about_s)
            for name, workloads, about_s in (
                ("operations", "gelu elementwise layernorm_linear softmax", 450),
                ("networks", "mlp lenet5 branches", 400),
                ("models", "bert training", 450),
                ("others", OTHERS, 350),
            )
        ),
        *(
            Job(f"subsets_{name}", 560, f"{SUBSETS} --only {name} --seconds 540 {KEEP}", 500)
            for name in ("mlp", "lenet5", "vision", "bert_1x128", "bert_16x512")
        ),
        *(
            Job(f"subsets_{name}", 590, f"{SUBSETS} --cases $CASES --only {name} --seconds 570 {KEEP}", 560)
            for name in ("unet_softmax", "gpt_accumulation")
        ),
    ],
    "suites": [
        Job(f"judged_level{level}", 590, f"-m optexp.judge $KERNELBENCH/level{level} --strategy fusion --preset quick"
            " --into {folder}/judged.jsonl") for level in (2, 3, 1)
    ],
    "versions": [
        Job("duets", 590, f"{BENCHMARKS}/duets.py {{folder}}/duets.json --device cuda --seconds 540 {KEEP}"),
    ],
    "equivalence": [
        Job("verification_cost", 60, f"{BENCHMARKS}/verification_cost.py {KEEP}"),
        Job("calibrate_gates", 330, f"{BENCHMARKS}/calibrate_gates.py --seconds 300 --seeds 4 --processes 8 {KEEP}"),
        job("seeds_adamw", 200, f"-m {LENET} {SEEDS} strategy={ADAMW}", 15, 0, 2),
        job("seeds_bert", 150, f"workload=bert {SEEDS} strategy=fusion", 10, 0, 2),
        job("seeds_resnet", 200, f"workload=vision workload.mode=train {SEEDS} strategy=channels_last", 18),
    ],
    "measurement": [
        Job("time_to_verdict", 150, f"{BENCHMARKS}/time_to_verdict.py {KEEP}", 120),
        Job("clocks", 60, f"{BENCHMARKS}/false_alarms.py {{}}.json --clocks {KEEP}"),
        Job("false_alarms", 260, f"{BENCHMARKS}/false_alarms.py {{}}.json --seconds 200 {KEEP}"),
        Job("doctor", 150, "-m optexp.doctor"),
    ],
    "causes": [
        Job("blind", 240, f"-m tests.benchmarks.blind {KEEP}"),
        Job("blind_fresh", 240, f"-m tests.benchmarks.blind --programs fresh {KEEP}"),
    ],
    "kernels": [
        Job("kernels", 595, f"-m optexp.benchmark --compile default --plots --output {{}} {KEEP}", 540),
    ],
}  # fmt: skip

BLOCKS: Mapping[str, str] = {"main_job": "main_", "stacks": "stacks_", "gates.seeds": "seeds_"}  # and their jobs' names
README = "main_graph"  # the comparison that it shows


def collect(folder: Path) -> Iterator[Path]:
    """Write the records of what is done: benchmarks have written theirs."""
    from tests.benchmarks import results  # imports torch, which no job needs here

    for study_job in GROUPS["studies"]:
        if done(study_job, folder):
            name, record = results.study(folder / study_job.name)
            yield keep(record, name, folder / RECORDS)
    jobs = [each for group in GROUPS.values() for each in group]
    for block, prefix in BLOCKS.items():
        finished = [folder / each.name for each in jobs if each.name.startswith(prefix) and done(each, folder)]
        if finished:
            yield keep(results.compared(finished), block, folder / RECORDS)
    if done(next(each for each in GROUPS["main"] if each.name == README), folder):
        yield keep(results.shown(folder / README), "README", folder / RECORDS)
    if (folder / "judged.jsonl").exists():
        yield keep(results.judged(folder / "judged.jsonl"), "kernelbench", folder / RECORDS)
    if list(folder.glob("tests_*.xml")):
        yield keep(results.tested(folder), "gpu_tests", folder / RECORDS)


def done(each: Job, folder: Path) -> bool:
    """Whether it ended by itself, with a record of at least a part. A comparison's exit status is its verdict's."""
    return not left(each, folder) and any((folder / each.name).rglob("result.json"))


def chosen(names: list[str]) -> Iterator[Job]:
    jobs = {job.name: [job] for group in GROUPS.values() for job in group}
    unknown = [name for name in names if name not in GROUPS and name not in jobs]
    if unknown:
        sys.exit(f"no group or job called {', '.join(unknown)}; there are {', '.join([*GROUPS, *jobs])}")
    for name in names or GROUPS:
        yield from GROUPS.get(name) or jobs[name]


def run(job: Job, folder: Path, within_s: float) -> str:
    """How it ended. It and all that it started are gone then."""
    log, begin = folder / f"{job.name}.log", time.monotonic()
    command = [sys.executable, *job.arguments(folder)]
    with log.open("w") as out:
        print("$ python", *command[1:], file=out, flush=True)
        process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            status = process.wait(min(job.limit_s, within_s))
            ending = DONE if status == 0 else f"{FAILED} {status}"
        except subprocess.TimeoutExpired:
            ending = CUT
            process.send_signal(signal.SIGINT)  # pytest then says what failed so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(10)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"\n{ending}", file=out)
    return f"{ending}, {time.monotonic() - begin:.0f} s"


def left(job: Job, folder: Path) -> bool:
    """Whether it is still to be run, or again: it, or this script, was cut off."""
    log = folder / f"{job.name}.log"
    return not log.exists() or not log.read_text().rpartition("\n\n")[2].startswith((DONE, FAILED))


@contextmanager
def claimed(job: Job, folder: Path) -> Iterator[bool]:
    """Whether no other run of this script has this job; it is this run's meanwhile."""
    with (folder / f"{job.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", nargs="*")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--list", action="store_true", help="print the commands and about how long they take, run none")
    parser.add_argument("--records", action="store_true", help="write the records of what is done, run nothing")
    options = parser.parse_args()
    folder, end = options.folder.resolve(), time.monotonic() + options.within
    folder.mkdir(parents=True, exist_ok=True)
    if options.records:
        print(*collect(folder), sep="\n")
        return
    jobs = list(chosen(options.what))
    if options.list:
        show(jobs, folder)
        return
    for job in jobs:
        with claimed(job, folder) as mine:
            if job.lacks:
                print(f"{job.name}: left out, as {job.lacks} is not set", flush=True)
            elif mine and left(job, folder) and end - time.monotonic() > min(job.seconds, job.limit_s):
                print(f"{job.name}: {run(job, folder, end - time.monotonic())}", flush=True)


def show(jobs: list[Job], folder: Path) -> None:
    """About how long each job takes, and its command."""
    for job in jobs:
        command = shlex.join(job.arguments(folder))
        print(f"{job.name}: about {job.seconds:.0f} s, at most {job.limit_s:.0f} s: python {command}")
    for name, group in GROUPS.items():
        if own := [job for job in group if job in jobs]:
            print(f"{name}: about {sum(job.seconds for job in own) / 60:.0f} min")


if __name__ == "__main__":
    main()
