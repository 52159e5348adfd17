"""All that experiments/results/ records, measured again: one job after another, each with a limit and a log.

    python tests/benchmarks/everything.py FOLDER [GROUP or JOB ...] [--within SECONDS] [--list]

Nothing else may use the GPU. A job whose log is in FOLDER is not run again, so that the whole may be made in several
runs; what was cut off is.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DONE, FAILED, CUT = "done", "exit status", "cut off"  # what the log of a job ends with


@dataclass(frozen=True)
class Job:
    """A command, what follows its Python, and the seconds it may take; {} is a folder of its own."""

    name: str
    limit_s: float
    command: str


def job(name: str, limit_s: float, arguments: str) -> Job:
    """One comparison, or a sweep of them."""
    place = "hydra.sweep.dir={}" if "-m " in arguments or "experiments=" in arguments else "hydra.run.dir={}"
    return Job(name, limit_s, f"-m optexp {arguments} {place}")


def gpu_tests(name: str, limit_s: float, arguments: str, processes: int = 6, slow: bool = False) -> Job:
    marks = "gpu and slow" if slow else "gpu and not slow"
    tell = "-q --tb=short -p tests.benchmarks.telling -p no:benchmark -o faulthandler_timeout=90"
    return Job(name, limit_s, f"-m pytest {tell} -m '{marks}' -n {processes} -o cache_dir={{}} {arguments}")


BENCHMARKS = "tests/benchmarks"
GAINS = "tests/strategies/test_gains_on_gpu.py"
MEASURE = (
    "tests/measurement",
    "tests/test_end_to_end_on_gpu.py",
    "tests/profiling",
)  # nothing may run beside
APART = ("tests/kernels", "tests/cheats", "tests/strategies", *MEASURE)
ADAMW = "amp,fusion,cuda_graph,fused_optimizer,compiled_optimizer"
LENET = "workload=lenet5 workload.mode=train"
QUICK = "measurement=quick measurement.pairs=12"
BRIEF = "measurement=quick measurement.process_s=1 measurement.warmup_s=0.5"
OTHERS = "add,matmul,cdist,linear_gelu,vision,causal_lm,sleep,graph_break,changing_shapes,workspace,pipeline"
SEEDS = "replay=benchmarks verify=only measurement.verification_seeds=20"

GROUPS: dict[str, list[Job]] = {
    "main": [
        job("main_graph", 150, "workload=mlp strategy=cuda_graph"),
        job("main_unbound", 150, "workload=mlp strategy=cuda_graph measurement.cpus=all"),
        job("main_fusion_graph", 150, "workload=mlp strategy=fusion+cuda_graph"),
        job("main_gelu", 150, "workload=gelu strategy=fusion"),
    ],
    "studies": [
        job("smoke", 60, "workload=mlp strategy=cuda_graph measurement=quick"),
        job("bert_train", 400, f"-m workload=bert workload.mode=train strategy=fusion,cuda_graph {QUICK}"),
        job("overlap", 200, "experiments=overlap_chunks study.step=streams"),
        job("chunks", 150, "experiments=overlap_chunks study.step=pageable,pinned"),
        job("training_loop", 300, "experiments=training_loop"),
        job("mlp_stacks", 200, "experiments=mlp_stacks"),
        *(
            job(name, 200, f"experiments={name} {sizes}")
            for name, sizes in {
                "gelu_five_ways": "workload.size=8192",
                "elementwise": "",
                "graph_by_kernel_count": "",
                "lenet_compile": "",
                "matmul_scaling": "",
                "mlp_batch_sizes": "",
                "mlp_scaling": "",
                "operator_profiles": "",
                "launch_configuration": "",
                "bert_profile": "",
            }.items()
        ),
    ],
    "tests": [
        gpu_tests("tests_core", 150, "tests " + " ".join(f"--ignore={path}" for path in APART)),
        gpu_tests("tests_measure", 150, " ".join(MEASURE), processes=0),
        gpu_tests("tests_cheats", 300, "tests/cheats", processes=4),
        gpu_tests("tests_strategies", 200, "tests/strategies"),
        gpu_tests("tests_kernels", 300, "tests/kernels"),
        gpu_tests("tests_slow", 300, f"tests --ignore={GAINS}", processes=4, slow=True),
    ],
    "strategies": [
        gpu_tests("gains", 400, f"-s {GAINS}", processes=0, slow=True),
        Job("pairs", 400, f"{BENCHMARKS}/pairs.py run {{}} 5"),
        Job("every_verdict", 600, f"{BENCHMARKS}/every_verdict.py {{}}/pairs.json --seconds 600"),
        job("other_workloads", 400, f"-m workload={OTHERS} strategy=fusion,cuda_graph {BRIEF}"),
    ],
    "equivalence": [
        Job("verification_cost", 60, f"{BENCHMARKS}/verification_cost.py"),
        Job("calibrate_gates", 330, f"{BENCHMARKS}/calibrate_gates.py --seconds 300 --processes 8"),
        job("seeds_adamw", 200, f"-m {LENET} {SEEDS} strategy={ADAMW}"),
        job("seeds_bert", 150, f"workload=bert {SEEDS} strategy=fusion"),
        job("seeds_resnet", 200, f"workload=vision workload.mode=train {SEEDS} strategy=channels_last"),
    ],
    "measurement": [
        Job("time_to_verdict", 120, f"{BENCHMARKS}/time_to_verdict.py"),
        Job("clocks", 60, f"{BENCHMARKS}/false_alarms.py {{}}.json --clocks"),
        Job("false_alarms", 230, f"{BENCHMARKS}/false_alarms.py {{}}.json --seconds 200"),
        Job("doctor", 150, "-m optexp.doctor"),
    ],
    "kernels": [
        Job("kernels", 300, "-m optexp.benchmark --quick --compile none"),
        Job("kernels_compiled", 600, "-m optexp.benchmark --compile all --plots"),
    ],
}  # fmt: skip


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
    command = [sys.executable, *shlex.split(job.command.format(folder / job.name))]
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("what", nargs="*")
    parser.add_argument("--within", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--list", action="store_true", help="print the commands, run none")
    options = parser.parse_args()
    folder, end = options.folder.resolve(), time.monotonic() + options.within
    folder.mkdir(parents=True, exist_ok=True)
    for job in chosen(options.what):
        if options.list:
            print(f"{job.name} ({job.limit_s:g} s): python {job.command.format(folder / job.name)}")
        elif left(job, folder) and end - time.monotonic() > 10:
            print(f"{job.name}: {run(job, folder, end - time.monotonic())}", flush=True)


if __name__ == "__main__":
    main()
