"""The profile of one arm: a few traced steps and its memory, its bottlenecks, and where they go in the record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from optexp.comparison.checklist import checklist
from optexp.comparison.compiler_evidence import compiler_evidence
from optexp.comparison.physics import roofline
from optexp.comparison.recordings import cycles, stacked
from optexp.comparison.session import Session
from optexp.comparison.suggestions import advise
from optexp.profiling.beaten import by_operators
from optexp.profiling.breakdown import Breakdown, breakdown
from optexp.profiling.lines import lines, origins
from optexp.profiling.memory_difference import difference
from optexp.profiling.regions import Excerpt, excerpt, named, phases, regions, shares_of_region
from optexp.profiling.tables import MOST_TOP, tables
from optexp.profiling.view import View
from optexp.records import filenames
from optexp.records.compiler import CompilerEvidence
from optexp.records.memory import MemoryProfile
from optexp.records.profile import ArmProfile, Bottleneck, Calibration, Check
from optexp.records.ranges import Ranges, TraceFile
from optexp.result import ArmSummary
from optexp.strategy import Strategy
from optexp.support.ranges import REGION
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import PeakMemory
from optexp.workers.peer import Peer

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
    ranges: Ranges = field(default_factory=Ranges)
    excerpt: Excerpt | None = None  # of the region that the breakdown is limited to
    compiler: CompilerEvidence | None = None
    by_category: MemoryProfile | None = None  # its memory

    @property
    def shown(self) -> Trace:
        """The steps that the breakdown is of: of a region alone, where one was asked for."""
        return self.trace if self.excerpt is None else self.excerpt.alone

    @property
    def traces(self) -> list[Trace]:
        """Behind the tables of operators, of modules and of lines."""
        return [trace for trace in (self.shown, self.by_module, self.places) if trace is not None]

    def fill(self, summary: ArmSummary) -> None:
        """The figures that come from here. On a CPU the peak is what lives between steps and what a step allocates."""
        metrics = (self.breakdown if self.excerpt is None else breakdown(self.trace)).metrics()
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

    @cached_property
    def view(self) -> View:
        """For an explanation."""
        return View(self.shown, self.breakdown, self.places, self.beside)

    def record(self) -> ArmProfile:
        metrics = self.breakdown.metrics() | self.memory.metrics()
        trace = self.trace if self.excerpt is None else self.excerpt.tables
        found = tables(metrics, trace, self.by_module, MOST_ROWS, MOST_TOP)
        if self.ranges.region and self.by_module is not None:
            found = replace(found, modules=shares_of_region(found.modules, self.by_module, self.ranges.region))
        marked = regions(self.trace)[:MOST_ROWS]
        ranges = replace(self.ranges, phases=phases(self.trace), regions=marked)
        if self.places is not None:
            ranges = replace(ranges, lines=lines(self.places)[:MOST_ROWS], origins=origins(self.places))
        memory = self.by_category_at_peak
        shortened = memory.shortened() if memory else None
        return replace(found, ranges=ranges, compiler=self.compiler, memory=shortened)


def profile(
    session: Session,
    arm: Client[Arm],
    name: str,
    calibration: Calibration | None = None,
    beside: Trace | None = None,
    brief: bool = False,
) -> Profile:
    """Memory, then a trace. Nothing is timed in that process afterwards: leftover tracing slows what follows.

    Args:
        brief: Leave out modules, lines, stacks and memory by category, which take many times as long.
    """
    folder = session.output / filenames.TRACES
    folder.mkdir(exist_ok=True)
    memory = peak_memory(session, arm)
    calibration = calibration or ceilings(session, arm)
    trace, counters, recorded = cycles(session, arm, name, brief or session.looks)
    calibration = session.calibrated(by_operators(calibration, trace))
    details = bool(session.experiment.profile.details) and not brief
    of_modules = folder / f"{name}_modules.json.gz"
    known = details and arm.call(Arm.profile_modules, path=str(of_modules), steps=MARKED_STEPS)
    of_places = folder / f"{name}_places.json.gz"
    placed = known and arm.call(Arm.profile_places, path=str(of_places))
    compiler = compiler_evidence(session, arm, name, trace)
    snapshot = str(session.output / filenames.MEMORY / f"{name}.pickle")
    recording = arm.start(Arm.memory_by_category, snapshot=snapshot) if details else None  # while traces are read here
    by_module = Trace.read(of_modules) if known else None
    places = Trace.read(of_places) if placed else None
    by_category = recording.wait() if recording else None
    files = [_file(f"{name}.json.gz", "steady steps")]
    files += [_file(of_modules.name, "with a range around each module's call")] if known else []
    files += [_file(of_places.name, "with a range around each line of your code")] if placed else []
    region = session.experiment.profile.region
    ranges = Ranges(region=region or "", cycles=recorded, files=files)
    found = Profile(
        trace,
        breakdown(trace, calibration, beside),
        memory,
        counters,
        calibration,
        by_module=by_module,
        places=places,
        beside=beside,
        ranges=ranges if brief else stacked(session, arm, name, ranges),
        compiler=compiler,
        by_category=by_category,
    )
    return found if region is None else of_region(found, region)


def peak_memory(session: Session, arm: Client[Arm]) -> PeakMemory:
    """Peak memory of a few steps, and the driver's own figure of the whole process where it has one."""
    memory = arm.call(Arm.peak_memory, steps=session.settings.profile_steps)
    used = session.machine.gpu.processes().get(arm.pid) if session.machine.gpu else None
    return memory if used is None else replace(memory, process_mib=used / 2**20)


def _file(name: str, shows: str) -> TraceFile:
    return TraceFile(f"{filenames.TRACES}/{name}", shows)


def of_region(found: Profile, region: str) -> Profile:
    """The profile limited to one region."""
    part = excerpt(found.trace, region)
    return replace(
        found,
        breakdown=breakdown(part.alone, found.calibration, found.beside),
        by_module=within(found.by_module, region),
        places=within(found.places, region),
        excerpt=part,
    )


def within(trace: Trace | None, region: str) -> Trace | None:
    """Operators of a region in a trace of few steps; None where those did not enter it."""
    if trace is None or region not in named(trace, REGION):
        return None
    return excerpt(trace, region).tables


def ceilings(session: Session, arm: Client[Peer]) -> Calibration:
    """Ceilings of the device; those measured beside other programs serve for this comparison alone."""
    return arm.call(Peer.calibrate, keep=not session.neighbours()[0])


def show_where_time_goes(
    session: Session, profiles: Mapping[str, Profile], bottlenecks: Sequence[Bottleneck], checks: Sequence[Check]
) -> None:
    """Profiles into the result, with bottlenecks and checklist of the last of them."""
    result, stacks = session.result, {"baseline": session.baseline, "candidate": session.stack}
    for name, found in profiles.items():
        shown = roofline(session, stacks[name].contract, found.trace, session.calibration or found.calibration)
        setattr(result.profile, name, replace(found.record(), roofline=shown))
        found.fill(getattr(result, name))
    compared = [profiles[name].by_category_at_peak for name in ("baseline", "candidate") if name in profiles]
    if len(compared) == 2 and compared[0] is not None and compared[1] is not None:
        result.profile.memory = difference(compared[0], compared[1])
    result.profile.bottlenecks, result.profile.checklist = list(bottlenecks), list(checks)


def checked(
    arm: Client[Arm], found: Profile, bottlenecks: Sequence[Bottleneck], stack: Sequence[Strategy]
) -> list[Check]:
    """The checklist of a profiled arm."""
    return checklist(arm, found.shown, found.calibration, found.breakdown.metrics(), bottlenecks, stack)


def advised(arm: Client[Arm], found: Profile, stack: Sequence[Strategy]) -> list[Bottleneck]:
    """Bottlenecks of a profiled arm, and strategies that may help."""
    return advise(arm, found.view, stack, found.calibration)
