"""The one story: build the arms, verify, profile, measure, explain, record.

    config ──▶ arms ──▶ verification ──▶ profile (evidence) ──▶ measurement ──▶ verdict ──▶ record
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from random import Random

from omegaconf import DictConfig

from optexp import discovery, record, terminal
from optexp.conclusion import conclude
from optexp.config import ConfigError, resolve
from optexp.equivalence import protocol as equivalence
from optexp.equivalence.protocol import Verification
from optexp.insight.breakdown import breakdown
from optexp.insight.calibration import Calibration
from optexp.insight.diagnosis import diagnose, suggestion
from optexp.insight.explanation import explain
from optexp.insight.trace import Trace
from optexp.measurement import placement, statistics
from optexp.measurement.sampling import Sample, sample
from optexp.processes import Failure, describe
from optexp.result import ArmSummary, Result, Verdict
from optexp.session import Arm, Session, Stop, alongside, choose_device
from optexp.stopwatch import Stopwatch, process_age_s
from optexp.strategy import Unsupported, compose
from optexp.terminal import Progress
from optexp.workload import Workload

_first_run = True


def run(
    config: DictConfig, output: Path, workload: Workload | None = None, show: terminal.Show = terminal.show
) -> Result:
    """One comparison (or one profile) from its configuration to its record. Raises only KeyboardInterrupt.

    workload:  an object instead of the configuration's; then this process is not the command's own
    """
    global _first_run
    watch = Stopwatch(process_age_s() if _first_run and workload is None else 0.0)
    _first_run = False
    output.mkdir(parents=True, exist_ok=True)
    with Progress() as progress:
        try:
            with watch.phase("import"):
                experiment = resolve(config, workload)
                session = Session(experiment, choose_device(experiment.device), output, watch, progress)
        except ConfigError as error:
            return record.configuration_error(error, config, output, show)
        result = session.result
        with record.Recorder(session, show) as recorder:
            try:
                (profile if experiment.mode == "profile" else compare)(session, recorder.start)
            except Stop as stop:
                result.verdict, result.headline = stop.verdict, f"{stop.verdict}: {stop.reason}"
            except Unsupported as reason:
                result.verdict, result.headline = Verdict.UNSUPPORTED, f"UNSUPPORTED: {reason}"
            except Failure as failure:
                undecided = failure.type == "NoReference"
                result.verdict = Verdict.UNVERIFIED if undecided else Verdict.ERROR
                result.headline = f"{result.verdict}: {failure.message if undecided else failure}"
                result.error = asdict(failure)
            except Exception as error:
                facts = describe(error) | {"traceback": traceback.format_exc()}
                result.verdict, result.headline = Verdict.ERROR, f"ERROR: {facts['message']}"
                result.error = facts
            finally:
                session.close()
            if not result.verdict.measured:
                result.speedup = None
            recorder.finish(result)
    return result


# --- the story -------------------------------------------------------------------------------------------------


def compare(session: Session, meanwhile: Callable[[], None]) -> None:
    """Fill in the session's result; `Stop`, `Unsupported` and `Failure` end it early."""
    result = session.result
    for stack in (session.stack, session.baseline):
        compose(stack)  # members that cannot work together are refused before anything starts
    with session.arms_for_evidence(meanwhile) as arms:
        verification = verify(session, arms)
        traces = profile_arms(session, arms)
    engaged(session, traces)
    result.equivalence = verification.to_dict()
    if not verification.ok:
        raise Stop(Verdict.NOT_EQUIVALENT, verification.headline)
    samples = measure(session)
    conclude(session, samples, verification)


def profile(session: Session, meanwhile: Callable[[], None]) -> None:
    """mode=profile: the baseline alone, where its time goes, and what fits it."""
    result = session.result
    with session.working("arms", "starting the baseline"), alongside(meanwhile):
        arms = session.start({"baseline": session.spec(session.baseline)})
        arm = arms["baseline"]
        setup = arm.wait()
        session.learn({"baseline": setup})
    with session.working("measurement", "timing it as it is"):
        arm.call("bind", cores=session.cores)
        steady = arm.call("warm_up", limit_s=session.protocol.warmup_s)
        result.baseline = ArmSummary(
            step_us=steady["step_s"] * 1e6,
            throughput=session.samples / steady["step_s"],
            setup_s=setup["setup_s"],
            peak_mib=arm.call("peak_memory", steps=5).get("peak_mib"),
        )
    profile_arms(session, arms)
    arm.close()
    bottlenecks = result.profile["bottlenecks"]
    named = f"{bottlenecks[0]['label']} ({bottlenecks[0]['why']})" if bottlenecks else "no single bottleneck"
    result.verdict, result.headline = Verdict.PROFILED, f"PROFILED: {named}"


def verify(session: Session, arms: Mapping[str, Arm]) -> Verification:
    """Equivalence, judged by the reference arm on inputs drawn after both arms were set up."""

    first = session.experiment.seed + 1
    with session.working("verification", "comparing with fp64 on fresh inputs"):
        return equivalence.verify(
            arms["reference"],
            arms["yardstick"],
            arms["candidate"],
            seeds=range(first, first + session.protocol.verification_seeds),
            # A frozen step count shows from the second on.
            steps=max(session.workload.variety, 3 if session.workload.mode == "train" else 1),
            contract=session.contract,
            on_progress=session.progress.update,
        )


def profile_arms(session: Session, arms: Mapping[str, Arm]) -> dict[str, Trace]:
    """Memory and a trace of each arm. Nothing is timed in these processes afterwards."""

    result, traces, parts = session.result, {}, {}
    (session.output / "traces").mkdir(exist_ok=True)
    with session.working("profile", "tracing a few steady steps of each arm"):
        calibration = Calibration.from_dict(arms["baseline"].call("calibrate"))
        for name in ("baseline", "candidate"):
            if name not in arms:
                continue
            summary: ArmSummary = getattr(result, name)
            memory = arms[name].call("peak_memory", steps=5)
            path = session.output / "traces" / f"{name}.json.gz"
            session.counters[name] = arms[name].call("profile", path=str(path), steps=session.protocol.profile_steps)
            trace = traces[name] = Trace.read(path)
            part = parts[name] = breakdown(trace, calibration=calibration)
            metrics = part.metrics()
            summary.peak_mib = memory.get("peak_mib", trace.peak_cpu_bytes and trace.peak_cpu_bytes / 2**20)
            summary.kernels = metrics.get("kernels")
            summary.gpu_busy = metrics.get("gpu_busy")
            result.profile[name] = {
                "metrics": metrics | {f"memory_{key}": value for key, value in memory.items()},
                "top_kernels": trace.top_kernels(10),
                "top_ops": trace.top_ops(10),
            }
    last = "candidate" if "candidate" in traces else "baseline"
    available = discovery.options("strategy")
    found = diagnose(traces[last], parts[last], available)
    result.profile["calibration"] = calibration.to_dict()
    result.profile["bottlenecks"] = [{"label": b.label, "share": b.share, "why": b.why, "try": list(b.try_)} for b in found]
    result.profile["suggestion"] = suggestion(found, [s.name for s in session.stack], available)
    if "candidate" in traces:
        result.explanation = explain(traces["baseline"], traces["candidate"], parts["baseline"], parts["candidate"])
    return traces


def engaged(session: Session, traces: Mapping[str, Trace]) -> None:
    """Every strategy proves that it happened; those that the baseline has too are exempt."""
    shared = {strategy.label for strategy in session.baseline}
    for strategy in session.stack:
        if strategy.label in shared:
            continue
        evidence = strategy.evidence(
            traces["baseline"],
            traces["candidate"],
            session.notes.get(strategy.name, {}),
            session.counters["candidate"],
        )
        session.result.evidence.append({"strategy": strategy.name, **asdict(evidence)})
    missing = [e for e in session.result.evidence if not e["engaged"]]
    if missing:
        raise Stop(Verdict.NOT_ENGAGED, "; ".join(f"{e['strategy']}: {e['text']}" for e in missing))


def measure(session: Session) -> list[Sample]:
    """Interleaved blocks in several processes of each arm, until the interval is narrow enough."""

    protocol, samples, order = session.protocol, list[Sample](), Random(session.experiment.seed)
    phases = session.watch.seconds
    already = sum(phases.values())
    with placement.keep_off(session.cores if session.isolated else []):
        while len(samples) < protocol.processes_max:
            index = len(samples)
            with session.working("arms", f"process {index + 1}: starting both arms"):
                arms = session.start(
                    {
                        "baseline": session.spec(session.baseline, seed_offset=index),
                        "candidate": session.spec(session.stack, seed_offset=index),
                    }
                )
                for arm in arms.values():
                    arm.wait()
                    arm.call("bind", cores=session.cores)
            with session.working("measurement", f"process {index + 1}: measuring"):
                samples.append(sample(arms["baseline"], arms["candidate"], protocol, order))
            for arm in arms.values():
                arm.close()
            spent = sum(phases.values()) - already
            interval = statistics.over_processes([s.log_ratio for s in samples], protocol.confidence)
            remaining = max(protocol.processes_min - len(samples), 0) * spent / len(samples)
            session.progress.update(f"{len(samples)} processes measured", remaining_s=remaining)
            if len(samples) >= protocol.processes_min and (
                statistics.precise_enough(interval, protocol.half_width) or spent > protocol.budget_s
            ):
                break
    return samples
