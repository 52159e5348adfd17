"""The profile of one arm: a few traced steps and its memory, its bottlenecks, and where they go in the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from optexp.comparison.checklist import checklist
from optexp.comparison.session import Session
from optexp.comparison.suggestions import advise
from optexp.measurement.neighbours import neighbours
from optexp.profiling.breakdown import Breakdown, breakdown
from optexp.profiling.memory_difference import difference
from optexp.profiling.tables import MOST_TOP, tables
from optexp.profiling.view import View
from optexp.records.memory import MemoryProfile
from optexp.records.profile import ArmProfile, Bottleneck, Calibration, Check
from optexp.result import ArmSummary
from optexp.strategy import Strategy
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import PeakMemory
from optexp.workers.peer import Peer

WARP = 32  # threads
MOST_ROWS = 60  # of a table in the record
MARKED_STEPS = 2  # of a trace by module


@dataclass(frozen=True)
class Profile:
    """A few traced steps of one arm, and its memory."""

    trace: Trace
    breakdown: Breakdown
    memory: PeakMemory
    counters: dict[str, float]
    calibration: Calibration
    by_module: Trace | None = None  # with a range around each module's call
    places: Trace | None = None  # of one step, with ranges around modules' calls and lines of the user's code
    beside: Trace | None = None  # of the same work launched kernel by kernel
    by_category: MemoryProfile | None = None  # its memory

    def fill(self, summary: ArmSummary) -> None:
        """The figures that come from here. On a CPU the peak is what lives between steps and what a step allocates."""
        metrics = self.breakdown.metrics()
        summary.kernels, summary.gpu_busy = metrics.get("kernels"), metrics.get("gpu_busy")
        if summary.gpu_busy is not None:
            summary.busy_us = summary.gpu_busy * metrics["step_us"]
        summary.peak_mib = self.peak_mib

    @property
    def peak_mib(self) -> float | None:
        """Measured peak memory; None where nothing counts it."""
        if self.memory.peak_mib is None and self.trace.peak_cpu_bytes is not None:
            return (self.memory.resident_mib or 0.0) + self.trace.peak_cpu_bytes / 2**20
        return self.memory.peak_mib

    @property
    def by_category_at_peak(self) -> MemoryProfile | None:
        """Memory by category, which adds up to the measured peak."""
        peak = self.peak_mib
        return self.by_category.reconciled(peak * 2**20) if self.by_category and peak is not None else None

    def view(self) -> View:
        """For an explanation."""
        return View(self.trace, self.breakdown, self.places, self.beside)

    def record(self) -> ArmProfile:
        metrics = self.breakdown.metrics() | self.memory.metrics()
        found, memory = tables(metrics, self.trace, self.by_module, MOST_ROWS, MOST_TOP), self.by_category_at_peak
        return replace(found, memory=memory.shortened() if memory else None)


def profile(
    session: Session, arm: Client[Arm], name: str, calibration: Calibration | None = None, beside: Trace | None = None
) -> Profile:
    """Memory, then a trace. Nothing is timed in that process afterwards: leftover tracing slows what follows."""
    folder = session.output / "traces"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json.gz"
    memory = arm.call(Arm.peak_memory, steps=session.settings.profile_steps)
    used = session.machine.gpu.processes().get(arm.pid) if session.machine.gpu else None
    if used is not None:  # the driver's own figure, context included; unknown where it counts processes otherwise
        memory = replace(memory, process_mib=used / 2**20)
    calibration = calibration or ceilings(session, arm)
    session.calibrated(calibration)
    counters = arm.call(Arm.profile, path=str(path), steps=session.settings.profile_steps)
    trace = Trace.read(path)
    of_modules = folder / f"{name}_modules.json.gz"
    known = arm.call(Arm.profile_modules, path=str(of_modules), steps=MARKED_STEPS)
    of_places = folder / f"{name}_places.json.gz"
    placed = known and arm.call(Arm.profile_places, path=str(of_places))
    ran = {(kernel.name, prod(kernel.block) // WARP) for kernel in trace.kernels if kernel.block}
    arm.call(Arm.code, folder=str(session.output / "code" / name), ran=sorted(ran))
    by_module = Trace.read(of_modules) if known else None
    places = Trace.read(of_places) if placed else None
    by_category = arm.call(Arm.memory_by_category, snapshot=str(session.output / "memory" / f"{name}.pickle"))
    found = breakdown(trace, calibration, beside)
    return Profile(trace, found, memory, counters, calibration, by_module, places, beside, by_category)


def ceilings(session: Session, arm: Client[Peer]) -> Calibration:
    """What the device can do; measured beside somebody else's work it serves for this comparison alone."""
    alone = session.machine.gpu is None or not neighbours(session.machine.gpu, session.pool.processes())[0]
    return arm.call(Peer.calibrate, keep=alone)


def show_where_time_goes(
    session: Session, profiles: Mapping[str, Profile], bottlenecks: Sequence[Bottleneck], checks: Sequence[Check]
) -> None:
    """Profiles into the result, with bottlenecks and checklist of the last of them."""
    result = session.result
    for name, found in profiles.items():
        setattr(result.profile, name, found.record())
        found.fill(getattr(result, name))
    compared = [profiles[name].by_category_at_peak for name in ("baseline", "candidate") if name in profiles]
    if len(compared) == 2 and compared[0] is not None and compared[1] is not None:
        result.profile.memory = difference(compared[0], compared[1])
    result.profile.bottlenecks, result.profile.checklist = list(bottlenecks), list(checks)


def checked(
    arm: Client[Arm], found: Profile, bottlenecks: Sequence[Bottleneck], stack: Sequence[Strategy]
) -> list[Check]:
    """The checklist of a profiled arm."""
    return checklist(arm, found.trace, found.calibration, found.breakdown.metrics(), bottlenecks, stack)


def advised(arm: Client[Arm], found: Profile, stack: Sequence[Strategy]) -> list[Bottleneck]:
    """What holds a profiled arm back, and what may help there."""
    return advise(arm, found.view(), stack, found.calibration)
