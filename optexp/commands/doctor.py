"""Is this machine fit to measure on? Looks, tries a measurement whose answer is known, and says what to fix.

python -m optexp.doctor [--quick] [--device cpu]
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

import torch
from packaging.requirements import Requirement
from packaging.version import Version

from optexp.api import compose
from optexp.commands.architecture import Architecture, lines
from optexp.comparison import gpu_lock
from optexp.comparison.measure import measure
from optexp.comparison.session import Session
from optexp.config import resolve
from optexp.errors import ConfigError
from optexp.kernelkit import extension
from optexp.measurement import statistics
from optexp.measurement.gpu import Gpu
from optexp.measurement.machine_load import MachineLoad
from optexp.measurement.neighbours import neighbours
from optexp.measurement.samples import Sample
from optexp.measurement.watchdogs import WATCHDOGS
from optexp.records.measurement import Control
from optexp.reporting.terminal import Progress
from optexp.result import Verdict
from optexp.support.nvml_count import count_by_nvml
from optexp.support.stopwatch import Stopwatch
from optexp.support.units import percent, ratio, rough
from optexp.workers import launching

TESTED = ("2.11", "2.13")  # torch versions
# Work of about 0.1 ms that the device alone decides on; where there is no GPU, of as long on a core or two.
PROBES = {"cuda": ["workload=gelu", "workload.size=4096"], "cpu": ["workload=gelu", "workload.size=256"]}
ITSELF = "against itself"
LOOKS_S = 10.0  # all checks with --quick, on a quiet machine
BUDGET_S = 40.0  # the measurement without --quick
MINUTE = [f"measurement.budget_s={BUDGET_S:g}", "measurement.warmup_s=1", "measurement.pairs=20"]
STEADY = 1.01  # times the lowest clock: the highest that needs no warning
SIGNS = {True: "✓", False: "✗", None: "!"}
UNCHECKED = "–"
QUICK = ["measurement.warmup_s=1", "measurement.block_ms=10", "measurement.pairs=45"]


@dataclass(frozen=True)
class Finding:
    """One line.

    ok:      None where it is worth knowing and nothing is wrong
    checked: something could have been found wrong; else the line only tells
    """

    name: str
    ok: bool | None
    text: str
    fix: str = ""
    checked: bool = True

    def __str__(self) -> str:
        fix = f"\n      → {self.fix}" if self.fix and not self.ok else ""
        sign = SIGNS[self.ok] if self.checked or not self.ok else UNCHECKED
        return f"  {sign} {self.name:<18}{self.text}{fix}"


def installation() -> Iterator[Finding]:
    """The packages that optexp asks for, and those that it was tested with."""
    yield Finding("Python", sys.version_info >= (3, 11), platform.python_version(), "optexp needs Python 3.11 or newer")
    for requirement in map(Requirement, wanted()):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            yield _package(requirement)
    tested = ".".join(version("torch").split(".")[:2]) in TESTED
    if not tested:
        yield Finding(
            "torch", None, f"tested with {' and '.join(TESTED)}", "results of another version may need a look"
        )


def wanted() -> list[str]:
    """Requirements of the installed package; without one, of this checkout."""
    try:
        return requires("optexp") or []
    except PackageNotFoundError:
        project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
        return list(project["dependencies"])


def _package(requirement: Requirement) -> Finding:
    try:
        found = version(requirement.name)
    except PackageNotFoundError:
        return Finding(requirement.name, False, "is not installed", f"pip install '{requirement}'")
    fits = requirement.specifier.contains(Version(found).base_version, prereleases=True)
    return Finding(requirement.name, fits, found, f"pip install '{requirement}'")


def tools(device: torch.device) -> Iterator[Finding]:
    """The CUDA C++ compiler, and the profilers beside torch's."""
    if device.type == "cuda":
        missing = extension.why_not(device)
        yield Finding("CUDA C++", not missing, missing or "can be compiled", "without it cuda kernels are UNSUPPORTED")
    for name, use in (
        ("nvcc", "CUDA C++"),
        ("ncu", "a kernel's own counters"),
        ("nsys", "timelines of a whole program"),
    ):
        found = shutil.which(name) or next(iter(_beside_cuda(name)), None)
        text = f"{found}{_release(found)}" if found else f"not found; it is used for {use}"
        yield Finding(name, True if found else None, text, "part of the CUDA toolkit; optional")


def _beside_cuda(name: str) -> Iterator[str]:
    for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda"):
        if home and os.access(path := Path(home) / "bin" / name, os.X_OK):
            yield str(path)


def _release(program: str) -> str:
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return ""
    found = re.search(r"(?:release|[Vv]ersion) ([\d.]+)", said)
    return f", {found[1]}" if found else ""


def machine(device: torch.device, gpu: Gpu | None) -> Iterator[Finding]:
    """Processor and card, as they are now."""
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    yield Finding("CPU", True, f"{cores} of {os.cpu_count()} cores allowed", checked=False)
    fix = "end other programs, or expect INCONCLUSIVE: the interval grows with what they disturb"
    yield Finding("load", load < 0.5 * cores or None, f"{load:.1f} processes want a core", fix)
    governor = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
    if governor.is_file():
        policy = governor.read_text().strip()
        yield Finding(
            "CPU clocks", policy == "performance" or None, policy, "sudo cpupower frequency-set -g performance"
        )
    if device.type != "cuda":
        text = "torch sees none: strategies for GPUs are UNSUPPORTED here, everything else works"
        yield Finding("GPU", None, text, "a torch built for CUDA, and a driver (nvidia-smi shows it)")
    elif gpu is None:
        yield Finding(
            "NVML", False, "does not answer: clocks, power and other programs stay unseen", "pip install nvidia-ml-py"
        )
    else:
        yield from card(gpu)


def card(gpu: Gpu) -> Iterator[Finding]:
    """The GPU's own readings, and other processes on it."""
    name, driver = gpu.ask("nvmlDeviceGetName"), gpu.nvml.nvmlSystemGetDriverVersion()
    yield Finding("GPU", True, f"{name}, driver {driver}, CUDA {torch.version.cuda} in torch", checked=False)
    major, minor = gpu.ask("nvmlDeviceGetCudaComputeCapability") or (0, 0)
    here, built = f"sm_{major}{minor}", torch.cuda.get_arch_list()
    flag = f"-gencode=arch=compute_{major}{minor},code={here} (TORCH_CUDA_ARCH_LIST={major}.{minor})"
    known = here in built or any(arch.startswith(f"sm_{major}") for arch in built)
    yield Finding(
        "compute capability", known, f"{major}.{minor}, {flag}", f"this torch was built for {', '.join(built)}"
    )
    yield from architecture((major, minor), built, driver, gpu)
    said = gpu.read()
    limit = gpu.ask("nvmlDeviceGetPowerManagementLimit")
    text = f"{said.temperature_c} °C, {said.power_w or 0:.0f} W of {(limit or 0) / 1e3:.0f} W, SM at {said.sm_mhz} MHz"
    yield Finding("now", not said.slowed, ", ".join([text, *said.slowed]), "let it cool, or ask who limits it")
    found, hidden = neighbours(gpu)
    others = ", ".join(found) or (f"{hidden} with ids of another container" if hidden else "none")
    fix = "end them, or accept them with environment.allow_foreign=true"
    yield Finding("other programs", not found if found or not hidden else None, others, fix)


def architecture(capability: tuple[int, int], built: Sequence[str], driver: str, gpu: Gpu) -> Iterator[Finding]:
    """Compilers and CUDA versions for this card. NVML is asked: torch would make a context in this process."""
    newest = gpu.newest_cuda()
    runs = f"{newest // 1000}.{newest % 1000 // 10}" if newest else ""
    compiler = shutil.which("nvcc") or next(iter(_beside_cuda("nvcc")), "")
    release = _release(compiler).removeprefix(", ") if compiler else ""
    for line in lines(Architecture(capability, built, torch.version.cuda or "", driver, runs, release)):
        yield Finding(line.name, line.ok, line.text, line.fix)


def trial(device: str, quick: bool) -> Iterator[Finding]:
    """A measurement of something against itself, and of a delay that is known: up to a minute."""
    preset = ["measurement=quick", *QUICK] if quick else ["measurement=default", *MINUTE]
    overrides = [*PROBES[torch.device(device).type], f"device={torch.device(device).type}", *preset]
    with tempfile.TemporaryDirectory() as folder, Progress() as progress:
        asked = [*overrides, "measurement.controls=true", "environment.allow_foreign=true"]
        experiment = resolve(compose(asked, {}, {}))
        session = Session(experiment, device, Path(folder), Stopwatch(), progress)
        try:
            timed = measure(session, fresh=True)
        finally:
            session.close()
    samples = timed.samples
    yield equal(samples, session)
    for name, control in timed.controls.items():
        yield of_control(name, control)
    for watch in (watchdog(samples) for watchdog in WATCHDOGS):
        yield Finding(watch.name, watch.ok or (False if watch.refuses else None), watch.text, checked=watch.looked)
    clocks = {r.sm_mhz for s in samples for pair in s.pairs for r in pair.readings if r.sm_mhz}
    if session.machine.gpu and clocks:
        steady = max(clocks) <= STEADY * min(clocks)
        yield Finding(
            "clocks",
            steady or None,
            f"SM at {min(clocks):.0f} to {max(clocks):.0f} MHz while measuring: {held(min(clocks), max(clocks))}",
            f"an administrator holds them: {session.machine.gpu.lock_command(min(clocks))}",
        )


def of_control(name: str, control: Control) -> Finding:
    """A control's line; one that was skipped is not ticked."""
    size = ratio(control.high / control.estimate) if control.high and control.estimate else ""
    fix = f"differences below {size} are INCONCLUSIVE here: " if size else ""
    looked = control.estimate is not None or not control.found
    fix += "a quieter machine, or measurement=rigorous"
    return Finding(name, control.ok and (control.found or None), control.text, fix, looked)


def held(low: float, high: float) -> str:
    """Verdict on locked clocks, in words, from the lowest and highest reading: NVML has no query for a lock."""
    if high > STEADY * low:
        return "they are not locked"
    return "they look locked" if high == low else "they did not move as far as matters, locked or not"


def equal(samples: Sequence[Sample], session: Session) -> Finding:
    """The verdict on two arms that are the same."""
    settings = session.settings
    ratios = [[p.log_ratio for p in s.kept] for s in samples]
    verdict, interval = statistics.verdict(ratios, settings.confidence, settings.min_effect)
    estimate, low, high = interval.ratios()
    basis = f"{percent(settings.confidence)} interval {low:.4f} to {high:.4f}"
    count = "one process" if len(samples) == 1 else f"{len(samples)} processes"
    text = f"{verdict}: {estimate:.4f}× ({basis}, {count})"
    ok = {Verdict.SAME: True, Verdict.INCONCLUSIVE: None}.get(verdict, False)
    fix = (
        "too noisy to call equal things equal within 1 %"
        if ok is None
        else "it sees what is not there: do not trust it"
    )
    return Finding(ITSELF, ok, text, fix)


def announcement(quick: bool, load: MachineLoad) -> str:
    """Expected duration under the machine's present load, and the shorter command."""
    looks = rough(LOOKS_S * load.slowdown)
    longer = rough(BUDGET_S + LOOKS_S * load.slowdown)
    parts = (f"about {looks if quick else longer}", load.text, "" if quick else f"--quick takes about {looks}")
    return "; ".join(filter(None, parts))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m optexp.doctor", description="Is this machine fit to measure on?")
    parser.add_argument("--quick", action="store_true", help="a trial of seconds, in one process")
    parser.add_argument("--device", default="auto", choices=("auto", "cuda", "cpu"))
    asked = parser.parse_args()
    print(f"optexp.doctor: {announcement(asked.quick, MachineLoad.now())}", file=sys.stderr, flush=True)
    count_by_nvml()
    launching.launcher()  # imports torch while this process looks around
    held = ExitStack()  # the lock ends with this process
    try:
        device = held.enter_context(gpu_lock.locked(asked.device, gpu_lock.announced))
    except ConfigError as mistake:
        sys.exit(f"optexp.doctor: {mistake}")
    torch_device, wrong, odd, noisy = torch.device(device), 0, 0, False
    parts = {
        "Installation": installation(),
        "Tools": tools(torch_device),
        "Machine": machine(torch_device, Gpu.open(torch_device)),
        "A known answer": trial(device, asked.quick),
    }
    for title, findings in parts.items():
        print(title)
        for finding in findings:
            print(finding, flush=True)
            wrong += finding.ok is False
            odd += finding.ok is None
            noisy |= finding.name == ITSELF and finding.ok is None
    known = f"; worth knowing: {odd}, marked {SIGNS[None]}" if odd else ""
    fit = "Too noisy for small differences, which will be INCONCLUSIVE" if noisy else "Fit to measure on"
    print(f"\n{f'{wrong} to fix' if wrong else fit}{known}.")
    sys.exit(1 if wrong else 0)
