"""What is known of a stack before it is timed: does it compute the same, did it happen, where does its time go?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from optexp.equivalence.protocol import Verification, verify
from optexp.insight.breakdown import Breakdown, breakdown
from optexp.insight.calibration import Calibration
from optexp.insight.trace import Trace
from optexp.result import ArmSummary
from optexp.session import Arm, Session, alongside
from optexp.strategy import Strategy, contract


@dataclass(frozen=True)
class Profile:
    """A few traced steps of one arm, and its memory."""

    trace: Trace
    breakdown: Breakdown
    memory: dict[str, float]
    counters: dict[str, float]

    def fill(self, summary: ArmSummary) -> None:
        """The figures that come from here. On a CPU the peak is what lives between steps and what a step allocates."""
        metrics = self.breakdown.metrics()
        summary.kernels, summary.gpu_busy = metrics.get("kernels"), metrics.get("gpu_busy")
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


def examine(
    session: Session, stack: Sequence[Strategy], name: str, meanwhile: Callable[[], None] = lambda: None
) -> Examination:
    """Verify, profile and question a stack, in arms of its own. While they set up, `meanwhile` is done here."""
    promise = contract(stack)
    bare = "bare" if session.baseline else "baseline"
    specs = {bare: session.spec(()), name: session.spec(stack), "reference": session.spec((), judges=promise)}
    if promise.dtype is not None:
        specs["yardstick"] = session.spec((), autocast=promise.dtype)
    with session.working("arms", f"starting the arms of the {name}"), alongside(meanwhile):
        arms = session.start(specs)
        # What fails in the plain program too is no strategy's fault: that arm says it first.
        setups = {arm: arms[arm].wait() for arm in specs}
    session.learn(setups[bare], setups)
    first = session.experiment.seed + 1
    with session.working("verification", "comparing with fp64 on fresh inputs"):
        verification = verify(
            arms["reference"],
            arms.get("yardstick", arms[bare]),
            arms[name],
            seeds=range(first, first + session.protocol.verification_seeds),
            # A frozen step count shows from the second on.
            steps=max(session.workload.variety, 3 if session.workload.mode == "train" else 1),
            contract=promise,
            on_progress=session.progress.update,
        )
    with session.working("profile", f"tracing a few steady steps of the {name}"):
        calibration = Calibration.from_dict(arms["reference"].call("calibrate"))
        profiles = {bare: profile(session, arms[bare], bare, calibration)}
        profiles[name] = profile(session, arms[name], name, calibration, beside=profiles[bare].trace)
    for arm in arms.values():
        arm.close()
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
    return Examination(verification, evidence, profiles[bare], profiles[name], seconds)


def profile(
    session: Session, arm: Arm, name: str, calibration: Calibration | None = None, beside: Trace | None = None
) -> Profile:
    """Memory, then a trace. Nothing is timed in that process afterwards: leftover tracing slows what follows."""
    folder = session.output / "traces"
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}.json.gz"
    memory = arm.call("peak_memory", steps=session.protocol.profile_steps)
    if calibration is None:
        calibration = Calibration.from_dict(arm.call("calibrate"))
    session.result.profile["calibration"] = calibration.to_dict()
    counters = arm.call("profile", path=str(path), steps=session.protocol.profile_steps)
    trace = Trace.read(path)
    return Profile(trace, breakdown(trace, calibration, beside), memory, counters)
