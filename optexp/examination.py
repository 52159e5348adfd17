"""What is known of a stack before it is timed: does it compute the same, did it happen, where does its time go?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from optexp.advice import advise
from optexp.equivalence.generic import told
from optexp.equivalence.protocol import Verification
from optexp.insight.breakdown import Breakdown, breakdown
from optexp.insight.calibration import Calibration
from optexp.insight.diagnosis import Bottleneck
from optexp.insight.piled import piled_up
from optexp.insight.trace import Trace
from optexp.measurement.neighbours import neighbours
from optexp.result import ArmSummary
from optexp.session import Arm, Session, alongside
from optexp.strategy import Strategy
from optexp.verification import Referee

WARP = 32  # threads


@dataclass(frozen=True)
class Profile:
    """A few traced steps of one arm, and its memory."""

    trace: Trace
    breakdown: Breakdown
    memory: dict[str, float]
    counters: dict[str, float]
    calibration: Calibration

    def fill(self, summary: ArmSummary) -> None:
        """The figures that come from here. On a CPU the peak is what lives between steps and what a step allocates."""
        metrics = self.breakdown.metrics()
        summary.kernels, summary.gpu_busy = metrics.get("kernels"), metrics.get("gpu_busy")
        if summary.gpu_busy is not None:
            summary.busy_us = summary.gpu_busy * metrics["step_us"]
        summary.peak_mib = self.memory.get("peak_mib")
        if summary.peak_mib is None and self.trace.peak_cpu_bytes is not None:
            summary.peak_mib = self.memory["resident_mib"] + self.trace.peak_cpu_bytes / 2**20

    def record(self) -> dict[str, Any]:
        return {
            "metrics": self.breakdown.metrics() | {f"memory_{key}": value for key, value in self.memory.items()},
            "top_kernels": self.trace.top_kernels(10),
            "top_ops": self.trace.top_ops(10),
        }


@dataclass(frozen=True)
class Examination:
    """A stack beside the bare program."""

    verification: Verification
    evidence: list[dict[str, Any]]
    bare: Profile
    stacked: Profile
    setups: dict[str, float]  # seconds to the first result, by arm: "bare" and "stacked"
    referee: Referee
    distrust: str | None  # why nothing that its process says about time can be believed
    bottlenecks: list[Bottleneck]
    bare_bottlenecks: list[Bottleneck]


def examine(
    session: Session, stack: Sequence[Strategy], name: str, meanwhile: Callable[[], None] = lambda: None
) -> Examination:
    """Verify, profile and question a stack, in arms of its own. While they set up, `meanwhile` is done here."""
    referee, bare = Referee(session, stack, name), "bare" if session.baseline else "baseline"
    specs = {bare: session.spec((), generic=True), **referee.specs()}
    plain = referee.promise.dtype is None
    if plain:
        del specs["yardstick"]  # which the bare program is itself
    with session.working("arms", f"starting the arms of the {name}"), alongside(meanwhile):
        # What fails in the plain program too is no strategy's fault: that arm says it first. The stack's own is next:
        # what cannot run under autocast fails in the yardstick too, and a strategy says it better.
        arms, setups = session.set_up(specs, [bare, name])
    session.learn(setups[bare], setups)
    if name == "candidate":
        files = arms[bare].call("repro", packed=specs[name].pack(), notes=setups[name]["notes"])
        for file, content in files.items():
            (session.output / file).write_bytes(content)
    referee.random, referee.carries = setups[bare]["random"], setups[bare]["carries"]
    referee.keeps, referee.step_s = setups[bare]["keeps"], setups[bare]["step_s"]
    if name == "candidate":
        slower_s = max(setups[bare]["setup_s"], setups[name]["setup_s"])
        session.forecast(arms[bare], setups[bare], slower_s, referee.plan().steps)
    verification = referee.verify({"yardstick": arms[bare], **arms} if plain else arms, arms[bare])
    verification.varied = told(setups[name]["varied"])
    if setups[name]["random"] and not referee.random:
        verification.notes.append(f"the {name} draws random numbers; the bare program draws none")
    with session.working("profile", f"tracing a few steady steps of the {name}"):
        rest(session, *arms.values())
        calibration = ceilings(session, arms["reference"])
        profiles = {bare: profile(session, arms[bare], bare, calibration)}
        rest(session, arms[bare])
        profiles[name] = profile(session, arms[name], name, calibration, beside=profiles[bare].trace)
        bottlenecks = advised(arms[name], profiles[name], stack)
        bare_bottlenecks = advised(arms[bare], profiles[bare], ())
    distrust = referee.distrust(arms[name])
    traces = profiles[bare].trace, profiles[name].trace
    distrust = distrust or referee.uncopied(*traces, setups[bare]["batch_bytes"])
    if distrust is None and (piled := piled_up(*traces)):
        distrust = f"the {name} computes ahead: {piled}"
    referee.stay(arms, bare)
    notes = setups[name]["notes"]
    evidence = [
        {
            "strategy": strategy.name,
            **asdict(
                strategy.evidence(
                    profiles[bare].trace, profiles[name].trace, notes.get(strategy.name, {}), profiles[name].counters
                )
            ),
        }
        for strategy in stack
    ]
    seconds = {"bare": setups[bare]["setup_s"], "stacked": setups[name]["setup_s"]}
    return Examination(
        verification,
        evidence,
        profiles[bare],
        profiles[name],
        seconds,
        referee,
        distrust,
        bottlenecks,
        bare_bottlenecks,
    )


def advised(arm: Arm, found: Profile, stack: Sequence[Strategy]) -> list[Bottleneck]:
    """What holds a profiled arm back, and what may help there."""
    return advise(arm, found.trace, found.breakdown, stack, found.calibration)


def rest(session: Session, *arms: Arm) -> None:
    """Where arms take turns, these wait."""
    for arm in arms if session.in_turns else ():
        arm.call("rest")


def profile(
    session: Session, arm: Arm, name: str, calibration: Calibration | None = None, beside: Trace | None = None
) -> Profile:
    """Memory, then a trace. Nothing is timed in that process afterwards: leftover tracing slows what follows."""
    folder = session.output / "traces"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json.gz"
    memory = arm.call("peak_memory", steps=session.protocol.profile_steps)
    used = session.gpu.processes().get(getattr(arm, "pid", 0)) if session.gpu else None
    if used is not None:  # the driver's own figure, context included; unknown where it counts processes otherwise
        memory["process_mib"] = used / 2**20
    calibration = calibration or ceilings(session, arm)
    session.result.profile["calibration"] = calibration.to_dict()
    counters = arm.call("profile", path=str(path), steps=session.protocol.profile_steps)
    trace = Trace.read(path)
    ran = {(kernel.name, prod(kernel.block) // WARP) for kernel in trace.kernels if kernel.block}
    arm.call("code", folder=str(session.output / "code" / name), ran=sorted(ran))
    return Profile(trace, breakdown(trace, calibration, beside), memory, counters, calibration)


def ceilings(session: Session, arm: Arm) -> Calibration:
    """What the device can do; measured beside somebody else's work it serves for this comparison alone."""
    alone = session.gpu is None or not neighbours(session.gpu, session.processes())[0]
    return Calibration.from_dict(arm.call("calibrate", keep=alone))
