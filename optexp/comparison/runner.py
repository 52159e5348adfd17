"""The one story: build the arms, verify, profile, measure, explain, record.

config ──▶ arms ──▶ verification ──▶ profile (evidence) ──▶ measurement ──▶ verdict ──▶ record
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median

from omegaconf import DictConfig

from optexp.arm import Arm
from optexp.comparison import textbook
from optexp.comparison.conclusion import conclude
from optexp.comparison.evaluation import Profile, advised, examine, profile
from optexp.comparison.measure import measure, refuse_company, say_how_to_lock
from optexp.comparison.session import Session, Stop, alongside, choose_device
from optexp.config import resolve
from optexp.errors import FORGED, UNTIMED, ConfigError, Failure, Unsupported
from optexp.insight.diagnosis import Bottleneck, suggestion
from optexp.insight.explanation import explain
from optexp.reporting import record, terminal
from optexp.reporting.terminal import Progress
from optexp.reporting.wording import at_precision, replayed, unchecked_bits
from optexp.result import ArmSummary, Problem, Result, Verdict
from optexp.stopwatch import Stopwatch, process_age_s
from optexp.strategy import Strategy, compose
from optexp.workers.serving import describe
from optexp.workload import Workload

ADVICE = "so it did with {tried}: use smaller inputs, or a device with more memory"

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
    (output / "result.json").unlink(missing_ok=True)  # an earlier job's, in a folder that was named anew
    with Progress() as progress:
        try:
            with watch.phase("import"):
                experiment = resolve(config, workload)
                session = Session(experiment, choose_device(experiment.device), output, watch, progress)
        except Exception as error:
            return record.not_built(error, config, output, show)
        result = session.result
        with record.Recorder(session, show) as recorder:
            try:
                (profile_only if experiment.mode == "profile" else compare)(session, recorder.start)
            except Stop as stop:
                result.verdict, result.headline = stop.verdict, f"{stop.verdict}: {stop.reason}"
            except Unsupported as reason:
                result.verdict, result.headline = Verdict.UNSUPPORTED, f"UNSUPPORTED: {reason}"
            except ConfigError as mistake:
                result.verdict, result.headline = Verdict.ERROR, f"ERROR: {mistake}"
            except Failure as failure:
                undecided = failure.type == "NoReference"
                result.verdict = Verdict.UNVERIFIED if undecided else Verdict.ERROR
                result.verdict = Verdict.INVALID if failure.type in (FORGED, UNTIMED) else result.verdict
                result.headline = f"{result.verdict}: {failure.message if undecided else failure}"
                result.error = Problem(failure.type, failure.message, failure.traceback, failure.worker)
            except Exception as error:
                raised = describe(error)
                result.verdict, result.headline = Verdict.ERROR, f"ERROR: {raised.message}"
                result.error = Problem(raised.type, raised.message, traceback.format_exc())
            finally:
                session.close()
            if result.verdict.measured and not (result.equivalence and result.equivalence.ok):
                result.verdict, result.headline = Verdict.UNVERIFIED, "UNVERIFIED: there is no record of a verification"
            if not result.verdict.measured:
                result.headline += (
                    replayed(result) if result.verdict not in (Verdict.ERROR, Verdict.UNSUPPORTED) else ""
                )
                result.withhold()
            recorder.finish(result)
    return result


# --- the story -------------------------------------------------------------------------------------------------


def compare(session: Session, meanwhile: Callable[[], None]) -> None:
    """Fill in the session's result; where memory runs out, once more with less of it."""
    while True:
        try:
            return compare_once(session, meanwhile)
        except Failure as failure:
            if not session.spare(failure):
                if session.tried and failure.type == "OutOfMemoryError":
                    failure.message += f" ({ADVICE.format(tried='; '.join(session.tried))})"
                raise
        meanwhile = _nothing  # it is done


def _nothing() -> None:
    return


def compare_once(session: Session, meanwhile: Callable[[], None]) -> None:
    """`Stop`, `Unsupported` and `Failure` end it early."""
    result = session.result
    for stack in (session.stack, session.baseline):
        compose(stack)  # members that cannot work together are refused before anything starts
    refuse_company(session)
    candidate = examine(session, session.stack, "candidate", meanwhile)
    # A stack to compare against is held to the same: a baseline that fell back or is wrong makes any ratio worthless.
    baseline = examine(session, session.baseline, "baseline") if session.baseline else None
    before = baseline.stacked if baseline else candidate.bare
    result.baseline.setup_s = baseline.setups["stacked"] if baseline else candidate.setups["bare"]
    result.candidate.setup_s = candidate.setups["stacked"]
    show_where_time_goes(session, {"baseline": before, "candidate": candidate.stacked}, candidate.bottlenecks)
    causes = baseline.bottlenecks if baseline else candidate.bare_bottlenecks
    result.profile["suggestion"] = next_step(session, causes, candidate.bottlenecks, helps=False)
    result.explanation = explain(before.trace, candidate.stacked.trace, before.breakdown, candidate.stacked.breakdown)
    result.evidence = candidate.evidence
    result.equivalence = candidate.verification
    for name, examined in (("", candidate), ("the baseline's ", baseline)):
        missing = [e for e in examined.evidence if not e["engaged"]] if examined else []
        if missing:
            raise Stop(Verdict.NOT_ENGAGED, "; ".join(f"{name}{e['strategy']}: {e['text']}" for e in missing))
    for examined in (candidate, baseline):
        if examined and examined.referee.replaced and examined.distrust:  # then its results are not what was computed
            raise Stop(Verdict.INVALID, examined.distrust)
    for name, examined in (("", candidate), ("the baseline itself: ", baseline)):
        if examined and not examined.verification.ok:
            raise Stop(Verdict.NOT_EQUIVALENT, name + examined.verification.headline)
    for name, examined in (("", candidate), ("the baseline itself: ", baseline)):
        if examined and examined.verification.undecided:
            raise Stop(Verdict.UNVERIFIED, name + examined.verification.undecided)
    for examined in (candidate, baseline):
        if examined and examined.distrust:
            raise Stop(Verdict.INVALID, examined.distrust)
    session.refuse_edits()
    if session.experiment.verify == "only":
        result.verdict = Verdict.VERIFIED
        at = at_precision(session.precision, result.equivalence)
        unchecked = unchecked_bits(candidate.verification.unchecked_bits)
        facts = f"VERIFIED: the results are the same{at}", unchecked, "nothing was timed"
        result.headline = "; ".join(filter(None, facts))
        result.profile["suggestion"] = next_step(session, causes, candidate.bottlenecks, helps=True)
        say_how_to_lock(session)
        return
    if baseline:
        baseline.referee.leave()
    if session.protocol.trials:
        textbook.measure(session)
        say_how_to_lock(session)
        result.explanation = []
        return
    samples = measure(session, candidate.referee.again)
    session.refuse_edits()
    candidate.referee.leave()
    conclude(session, samples, candidate.verification)
    helps = result.verdict is not Verdict.SLOWER and result.speedup is not None and result.speedup.estimate >= 1
    result.profile["suggestion"] = next_step(session, causes, candidate.bottlenecks, helps)


def profile_only(session: Session, meanwhile: Callable[[], None]) -> None:
    """mode=profile: the baseline alone, where its time goes, and what fits it."""
    if session.stack:
        names = ",".join(strategy.name for strategy in session.stack)
        raise ConfigError(
            f"mode=profile shows one program: leave strategy={names} out, or profile that stack as baseline=[{names}]"
        )
    result = session.result
    with session.working("arms", "starting the baseline"), alongside(meanwhile):
        starting = session.start({"baseline": session.spec(session.baseline)})["baseline"]
        arm, setup = starting.arm, starting.setup.wait()
    session.learn(setup, [setup])
    with session.working("measurement", "timing it as it is"):
        step_s = median(arm.call(Arm.warm_up, limit_s=session.protocol.warmup_s).alone_s)
    result.baseline = ArmSummary(step_us=step_s * 1e6, throughput=session.samples / step_s, setup_s=setup.setup_s)
    result.measurement["notes"].append("time/step is of single steps, each waited for: one of many takes less")
    say_how_to_lock(session)
    with session.working("profile", "tracing a few steady steps"):
        found = profile(session, arm, "baseline")
        causes = advised(arm, found, session.baseline)
        show_where_time_goes(session, {"baseline": found}, causes)
        result.profile["suggestion"] = suggestion(causes, members(session.baseline))
    arm.close()
    bottlenecks = result.profile["bottlenecks"]
    named = f"{bottlenecks[0]['label']} ({bottlenecks[0]['why']})" if bottlenecks else "no single bottleneck"
    result.verdict, result.headline = Verdict.PROFILED, f"PROFILED: {named}"


def show_where_time_goes(session: Session, profiles: Mapping[str, Profile], bottlenecks: Sequence[Bottleneck]) -> None:
    """Profiles into the result, and what holds the last of them back."""
    result = session.result
    for name, found in profiles.items():
        result.profile[name] = found.record()
        found.fill(getattr(result, name))
    result.profile["bottlenecks"] = [
        {"label": b.label, "share": b.share, "why": b.why, "try": list(b.try_)} for b in bottlenecks
    ]


def next_step(session: Session, before: Sequence[Bottleneck], after: Sequence[Bottleneck], helps: bool) -> str | None:
    """Beside a stack that helps, the remedy of what still holds it back; else another one, for the baseline.

    before, after: bottlenecks of both arms
    """
    if helps:
        return suggestion(after, members(session.stack or session.baseline))
    return suggestion(before, members(session.baseline), without=members(session.stack))


def members(stack: Sequence[Strategy]) -> list[str]:
    return [strategy.name for strategy in stack]
