"""PARENT: a profiled program once more, under an Nsight tool, in a process that the tool starts."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from glob import glob
from pathlib import Path

from optexp.comparison.session import Session
from optexp.profiling import nsight
from optexp.records import filenames
from optexp.records.nsight import ToolRun
from optexp.strategy import Strategy, environment
from optexp.support.ranges import NVTX
from optexp.workers import replay

PLACES = {  # beside those on the PATH, the last one first
    "ncu": ("/usr/local/cuda/bin/ncu", "/usr/local/cuda-*/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu"),
    "nsys": ("/usr/local/cuda/bin/nsys", "/opt/nvidia/nsight-systems/*/bin/nsys"),
}
NAMES = {"ncu": "Nsight Compute", "nsys": "Nsight Systems"}
LONGEST_S = 600.0
ROOT = Path(__file__).resolve().parents[2]  # where the tool's process finds optexp


def run(session: Session, stack: Sequence[Strategy]) -> ToolRun | None:
    """The program of a stack under the tool that `profile.tool` names; None where it names none.

    Its arm must have ended, as both may not fit on the card. Where the tool is not there or is refused its counters,
    the result holds the command to run by hand.
    """
    tool = session.experiment.profile.tool
    if tool is None:
        return None
    folder = session.output.resolve() / filenames.NSIGHT
    folder.mkdir(exist_ok=True)
    packed = folder / "baseline.pkl"
    replay.pack(session.spec(stack).pack(), packed)
    program = find(tool)
    command = [*asked(session, tool, program or tool, folder), sys.executable, "-m", replay.__name__, str(packed)]
    variables = {**environment(stack), **session.pool.visible, NVTX: "1", "PYTHONPATH": str(ROOT)}
    line = " ".join([*(f"{name}={shlex.quote(value)}" for name, value in variables.items()), shlex.join(command)])
    if not session.device.startswith("cuda"):
        return ToolRun(tool, line, f"{NAMES[tool]} did not run: it measures work on a GPU, and this is on a CPU.")
    if program is None:
        return ToolRun(tool, line, f"{NAMES[tool]} did not run: {tool} is not installed here; the command is ready.")
    with session.working("nsight", f"running the program under {NAMES[tool]}"):
        output = _output(command, variables)
        read = of_kernels if tool == "ncu" else of_system
        return read(line, program, folder, output)


def find(tool: str) -> str | None:
    """The tool's program."""
    found = shutil.which(tool)
    return found or next((path for place in PLACES[tool] for path in sorted(glob(place), reverse=True)), None)


def asked(session: Session, tool: str, program: str, folder: Path) -> list[str]:
    """The tool with its options; of a run, only what lies between cudaProfilerStart and -Stop."""
    wanted, report = session.experiment.profile, str(folder / "baseline")
    if tool == "ncu":
        options = ["--target-processes", "all", "--profile-from-start", "off", "--nvtx", "--graph-profiling", "node"]
        options += ["--set", wanted.ncu_set, "--launch-count", str(wanted.kernels)]
        return [program, *options, "--force-overwrite", "--export", report]
    options = ["--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none", "--cuda-graph-trace=node"]
    options += ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--force-overwrite=true"]
    return [program, "profile", *options, f"--output={report}"]


def of_kernels(line: str, program: str, folder: Path, output: str) -> ToolRun:
    """Nsight Compute's measurements of each kernel, and its rules' advice."""
    report = folder / "baseline.ncu-rep"
    if reason := nsight.refusal(output):
        return ToolRun(
            "ncu", line, f"Nsight Compute measured nothing: {reason}; the command is ready to run elsewhere."
        )
    if not report.exists():
        return ToolRun("ncu", line, f"Nsight Compute wrote no report: {_last(output)}")
    shown = [program, "--import", str(report), "--csv", "--page", "details", "--print-units", "base"]
    text = _output(shown, {})
    kernels = nsight.kernels(text)
    reason = "" if kernels else f"Nsight Compute's report holds no kernel: {_last(text)}"
    return ToolRun("ncu", line, reason, f"{filenames.NSIGHT}/{report.name}", kernels, nsight.advice(text))


def of_system(line: str, program: str, folder: Path, output: str) -> ToolRun:
    """Summaries of Nsight Systems."""
    report = folder / "baseline.nsys-rep"
    if not report.exists():
        return ToolRun("nsys", line, f"Nsight Systems wrote no report: {nsight.refusal(output) or _last(output)}")
    options = [f"--report={name}" for name in nsight.SYSTEM_REPORTS]
    stats = [program, "stats", *options, "--format=csv", f"--output={folder / 'baseline'}", "--force-export=true"]
    said, tables = _output([*stats, "--force-overwrite=true", str(report)], {}), []
    for name, title in nsight.SYSTEM_REPORTS.items():
        file = folder / f"baseline_{name}.csv"
        if file.exists() and (table := nsight.summary(title, file.read_text())).rows:
            tables.append(table)
    reason = "" if tables else f"Nsight Systems' report holds no summary: {_last(said)}"
    return ToolRun("nsys", line, reason, f"{filenames.NSIGHT}/{report.name}", tables=tables)


def _output(command: Sequence[str], variables: dict[str, str]) -> str:
    """The output of a command, of both streams, also where it fails."""
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=LONGEST_S,
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        printed = late.stdout or ""
        text = printed.decode(errors="replace") if isinstance(printed, bytes) else printed
        return f"{text}\n==ERROR== no end within {LONGEST_S:g} s: lower profile.kernels"
    except OSError as error:
        return f"==ERROR== {error}"
    return done.stdout


def _last(output: str) -> str:
    lines = [line for line in output.splitlines() if line.strip()]
    return lines[-1].strip() if lines else "it printed nothing"
