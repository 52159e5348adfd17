"""What is known of a stack before it is timed: does it compute the same, did it happen, where does its time go?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import prod

from optexp.comparison import distrust
from optexp.comparison.adjudicate import Examined
from optexp.comparison.case import Case, StepTraits
from optexp.comparison.checklist import checklist
from optexp.comparison.referee import Referee
from optexp.comparison.session import Session, alongside
from optexp.comparison.suggestions import advise
from optexp.equivalence.perturbation import told
from optexp.measurement.neighbours import neighbours
from optexp.profiling.breakdown import Breakdown, breakdown
from optexp.profiling.operators import by_name, by_path, call_tree
from optexp.profiling.piled import piled_up, tells, work
from optexp.records.profile import ArmProfile, Bottleneck, Calibration, Check
from optexp.records.verification import Verification
from optexp.result import ArmSummary, Engagement
from optexp.strategy import Notes, Strategy
from optexp.trace import Trace
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import PeakMemory, SetUp
from optexp.workers.peer import Peer
from optexp.workers.reference import Reference

WARP = 32  # threads
MOST_ROWS = 60  # of a table in the record
LIGHTEST = 0.005  # of a step: calls with less are left out of the tree
MARKED_STEPS = 2  # of a trace by module
TURNS = 5  # of batches, to tell the time of each step in a turn


@dataclass(frozen=True)
class Profile:
    """A few traced steps of one arm, and its memory."""

    trace: Trace
    breakdown: Breakdown
    memory: PeakMemory
    counters: dict[str, float]
    calibration: Calibration
    by_module: Trace | None = None  # with a range around each module's call

    def fill(self, summary: ArmSummary) -> None:
        """The figures that come from here. On a CPU the peak is what lives between steps and what a step allocates."""
        metrics = self.breakdown.metrics()
        summary.kernels, summary.gpu_busy = metrics.get("kernels"), metrics.get("gpu_busy")
        if summary.gpu_busy is not None:
            summary.busy_us = summary.gpu_busy * metrics["step_us"]
        summary.peak_mib = self.memory.peak_mib
        if summary.peak_mib is None and self.trace.peak_cpu_bytes is not None:
            summary.peak_mib = (self.memory.resident_mib or 0.0) + self.trace.peak_cpu_bytes / 2**20

    def record(self) -> ArmProfile:
        metrics, tree = self.breakdown.metrics() | self.memory.metrics(), call_tree(self.trace)
        return ArmProfile(
            metrics,
            self.trace.top_kernels(10),
            self.trace.top_ops(10),
            by_name(self.trace)[:MOST_ROWS],
            by_path(self.by_module)[:MOST_ROWS] if self.by_module else [],
            list(islice(tree.flattened(LIGHTEST * max(tree.host_us, tree.device_us)), MOST_ROWS)),
        )


@dataclass(frozen=True)
class Evaluation:
    """A stack beside the bare program."""

    verification: Verification
    evidence: list[Engagement]
    bare: Profile
    stacked: Profile
    setups: dict[str, float]  # seconds to the first result, by arm: "bare" and "stacked"
    referee: Referee
    replaced: bool  # its process has other functions than it began with, by which time is told or results are read
    distrust: str | None  # why nothing that its process says about time can be believed
    bottlenecks: list[Bottleneck]
    bare_bottlenecks: list[Bottleneck]
    checks: list[Check]

    def facts(self, prefix: str = "") -> Examined:
        """For the verdict; `prefix` starts a reason that is about this stack."""
        return Examined(self.verification, self.evidence, self.distrust or "", self.replaced, prefix)


@dataclass(frozen=True)
class Started:
    """Arms that were set up for one stack.

    bare, name: the names of the bare program's arm and of the stack's
    """

    bare: str
    name: str
    arms: dict[str, Client[Arm]]
    judge: Client[Reference]
    setups: dict[str, SetUp]

    @property
    def pair(self) -> tuple[Client[Arm], Client[Arm]]:
        """The bare program's arm, and the stack's."""
        return self.arms[self.bare], self.arms[self.name]

    @property
    def judged(self) -> dict[str, Client[Arm]]:
        """With a yardstick, which may be the bare program itself."""
        return {"yardstick": self.arms[self.bare], **self.arms}


def examine(
    session: Session, stack: Sequence[Strategy], name: str, meanwhile: Callable[[], None] = lambda: None
) -> Evaluation:
    """Verify, profile and question a stack, in arms of its own. While they set up, `meanwhile` is done here."""
    case = Case.of(session, stack, name)
    started = start(case, meanwhile)
    setup, setups = started.setups[name], started.setups
    case = replace(case, steps=StepTraits.of(setups[started.bare]))
    if name == "candidate":
        announce(case, started)
    referee = Referee(case)
    verification = referee.verify(started.judged, started.judge, started.arms[started.bare])
    verification.varied = told(setup.varied)
    if setup.random and not case.steps.random:
        verification.notes.append(f"the {name} draws random numbers; the bare program draws none")
    bare_arm, arm = started.pair
    with session.working("profile", f"tracing a few steady steps of the {name}"):
        bare, stacked = profiles(case, started)
        bottlenecks = advised(arm, stacked, stack)
        checks = checked(arm, stacked, bottlenecks, stack)
        bare_bottlenecks = advised(bare_arm, bare, ())
    replaced = bool(arm.call(Arm.replaced))
    reason = distrusted(referee, started, bare.trace, stacked.trace)
    referee.stay(started.arms, started.bare)
    return Evaluation(
        verification=verification,
        evidence=engagements(stack, bare, stacked, setup.notes),
        bare=bare,
        stacked=stacked,
        setups={"bare": setups[started.bare].setup_s, "stacked": setup.setup_s},
        referee=referee,
        replaced=replaced,
        distrust=reason,
        bottlenecks=bottlenecks,
        bare_bottlenecks=bare_bottlenecks,
        checks=checks,
    )


def start(case: Case, meanwhile: Callable[[], None]) -> Started:
    """Set up the arms, and take from them what they know of the workload."""
    session, name, bare = case.session, case.name, "bare" if case.session.baseline else "baseline"
    specs = {bare: session.spec((), generic=True), **case.specs()}
    if case.promise.dtype is None:
        del specs["yardstick"]  # which the bare program is itself
    with session.working("arms", f"starting the arms of the {name}"), alongside(meanwhile):
        # What fails in the plain program too is no strategy's fault: that arm says it first. The stack's own is next:
        # what cannot run under autocast fails in the yardstick too, and a strategy says it better.
        arms, judge, setups, facts = session.set_up(specs, case.reference_spec(), [bare, name])
    session.prove({built: arms[built] for built in (bare, name)})
    session.learn(setups[bare], setups.values(), facts)
    return Started(bare, name, arms, judge, setups)


def announce(case: Case, started: Started) -> None:
    """Write `repro.py` and what lies beside it, and forecast how long the comparison takes."""
    session, setups, bare = case.session, started.setups, started.arms[started.bare]
    files = bare.call(Arm.repro, packed=case.specs()[case.name].pack(), notes=setups[case.name].notes)
    for file, content in files.items():
        (session.output / file).write_bytes(content)
    slower_s = max(setups[started.bare].setup_s, setups[case.name].setup_s)
    session.forecast(bare, setups[started.bare], slower_s, case.plan().steps)


def profiles(case: Case, started: Started) -> tuple[Profile, Profile]:
    """Of the bare program, and of the stack."""
    session, (bare, arm) = case.session, started.pair
    rest(session, started.judge, *started.arms.values())
    calibration = ceilings(session, started.judge)
    before = profile(session, bare, started.bare, calibration)
    rest(session, bare)
    return before, profile(session, arm, case.name, calibration, beside=before.trace)


def distrusted(referee: Referee, started: Started, before: Trace, after: Trace) -> str | None:
    """Why nothing that the stack's process says about time can be believed."""
    case, (bare, arm), setup = referee.case, started.pair, started.setups[started.bare]
    reason = distrust.tampers(case, arm, referee.found.state, referee.changed)
    reason = reason or distrust.leaves_out_copies(case, before, after, setup.batch_bytes)
    if reason is None and (piled := piled_up(*shares(bare, arm, before, after, setup.turn))):
        reason = f"the {case.name} does not compute each step: {piled}"
    return reason


def engagements(
    stack: Sequence[Strategy], bare: Profile, stacked: Profile, notes: Mapping[str, Notes]
) -> list[Engagement]:
    """Whether each strategy did what it is for."""
    found = []
    for strategy in stack:
        proof = strategy.evidence(bare.trace, stacked.trace, notes.get(strategy.name, {}), stacked.counters)
        found.append(Engagement(strategy.name, proof.engaged, proof.text))
    return found


def shares(
    bare: Client[Arm], arm: Client[Arm], before: Trace, after: Trace, turn: int
) -> tuple[list[float], list[float]]:
    """Of each step of both, the work that its trace shows; else its time, as where all of it is numpy's."""
    found = work(before), work(after)
    if all(tells(steps, turn) for steps in found):
        return found
    return bare.call(Arm.turn_s, rounds=TURNS), arm.call(Arm.turn_s, rounds=TURNS)


def checked(
    arm: Client[Arm], found: Profile, bottlenecks: Sequence[Bottleneck], stack: Sequence[Strategy]
) -> list[Check]:
    """The checklist of a profiled arm."""
    return checklist(arm, found.trace, found.calibration, found.breakdown.metrics(), bottlenecks, stack)


def advised(arm: Client[Arm], found: Profile, stack: Sequence[Strategy]) -> list[Bottleneck]:
    """What holds a profiled arm back, and what may help there."""
    return advise(arm, found.trace, found.breakdown, stack, found.calibration)


def rest(session: Session, *arms: Client[Peer]) -> None:
    """Where arms take turns, these wait."""
    for arm in arms if session.in_turns else ():
        arm.call(Peer.rest)


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
    ran = {(kernel.name, prod(kernel.block) // WARP) for kernel in trace.kernels if kernel.block}
    arm.call(Arm.code, folder=str(session.output / "code" / name), ran=sorted(ran))
    by_module = Trace.read(of_modules) if known else None
    return Profile(trace, breakdown(trace, calibration, beside), memory, counters, calibration, by_module)


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
    result.profile.bottlenecks, result.profile.checklist = list(bottlenecks), list(checks)


def members(stack: Sequence[Strategy]) -> list[str]:
    """Names of a stack's strategies."""
    return [strategy.name for strategy in stack]
