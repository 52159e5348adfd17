"""mode=profile: the baseline alone, where its time goes, and the strategies that fit it."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

from optexp.comparison.adjudicate import Decision, Facts
from optexp.comparison.evaluation import advised, checked, members, profile, show_where_time_goes
from optexp.comparison.measure import say_how_to_lock
from optexp.comparison.session import Session, alongside
from optexp.comparison.suggestions import suggestion
from optexp.errors import ConfigError
from optexp.result import ArmSummary, Verdict
from optexp.workers.arm import Arm


def run(session: Session, facts: Facts, meanwhile: Callable[[], None]) -> Decision:
    """Fill in the profile; the verdict's reason is the largest bottleneck in words."""
    if session.stack:
        names = ",".join(strategy.name for strategy in session.stack)
        raise ConfigError(
            f"mode=profile shows one program: leave strategy={names} out, or profile that stack as baseline=[{names}]"
        )
    result = session.result
    with session.working("arms", "starting the baseline"), alongside(meanwhile):
        starting = session.pool.start({"baseline": session.spec(session.baseline)})["baseline"]
        arm, setup = starting.arm, starting.setup.wait()
    session.learn(setup, [setup])
    with session.working("measurement", "timing it as it is"):
        step_s = median(arm.call(Arm.warm_up, limit_s=session.settings.warmup_s).alone_s)
    result.baseline = ArmSummary(step_us=step_s * 1e6, throughput=session.samples / step_s, setup_s=setup.setup_s)
    result.notes.append("time/step is of single steps, each waited for: one of many takes less")
    say_how_to_lock(session)
    with session.working("profile", "tracing a few steady steps"):
        found = profile(session, arm, "baseline")
        causes = advised(arm, found, session.baseline)
        checks = checked(arm, found, causes, session.baseline)
        show_where_time_goes(session, {"baseline": found}, causes, checks)
        result.profile.suggestion = suggestion(causes, members(session.baseline))
    arm.close()
    reason = f"{causes[0].label} ({causes[0].why})" if causes else "no single bottleneck"
    return Decision(Verdict.PROFILED, reason)
