"""mode=profile: the baseline alone, where its time goes, and the strategies that fit it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from random import Random
from statistics import median

from optexp.comparison import nsight
from optexp.comparison.adjudicate import Decision, Facts
from optexp.comparison.compiler_evidence import logged, name_breaks
from optexp.comparison.conclusion import summarize
from optexp.comparison.evaluation import members
from optexp.comparison.measure import refuse_company, say_how_to_lock
from optexp.comparison.physics import drop_beaten, find_work, least_us, started
from optexp.comparison.predictions import UNTRUSTED, predicted
from optexp.comparison.profiles import Profile, advised, checked, profile, show_where_time_goes
from optexp.comparison.sampling import sample_alone
from optexp.comparison.session import Session, alongside
from optexp.comparison.suggestions import suggestion
from optexp.comparison.under_load import under_load
from optexp.errors import ConfigError
from optexp.measurement.watchdogs import cores, foreign, power_cap, recompilation, throttling
from optexp.profiling.explanation import DISTORTED
from optexp.profiling.passes import disagreement
from optexp.records.roofline import Phase
from optexp.result import Verdict
from optexp.support.units import duration
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import SetUp

DISTURBANCES = (cores, foreign, throttling, recompilation)
WIDE = 1.5  # a step that takes so many times another's time is another step


def run(session: Session, facts: Facts, meanwhile: Callable[[], None]) -> Decision:
    """Fill in the profile; the verdict's reason is the largest bottleneck in words."""
    if session.stack:
        names = ",".join(strategy.name for strategy in session.stack)
        raise ConfigError(
            f"mode=profile shows one program: leave strategy={names} out, or profile that stack as baseline=[{names}]"
        )
    result = session.result
    with session.working("arms", "starting the baseline"), alongside(meanwhile):
        starting = session.pool.start({"baseline": logged(session, session.spec(session.baseline), "baseline")})[
            "baseline"
        ]
        arm, setup = starting.arm, starting.setup.wait()
    session.learn(setup, [setup])
    following = [arm.call(Arm.one_step)[0] for _ in range(2)]
    disturbed = timed_alone(session, arm)
    result.baseline.setup_s = setup.setup_s
    say_how_to_lock(session)
    with session.working("profile", "tracing a few steady steps"):
        found = profile(session, arm, "baseline")
        find_work(session, arm)
        causes = advised(arm, found, session.baseline)
        checks = checked(arm, found, causes, session.baseline)
        show_where_time_goes(session, {"baseline": found}, causes, checks)
        drop_beaten(session)
        result.profile.baseline = started(result.profile.baseline, phases(setup, following, result.baseline.step_us))
        name_breaks(result)
        disputed = contradictions(found.trace.timed_us, result.baseline.step_us, found.breakdown.stretched)
        predict(session, arm, found, disputed)
    arm.close()
    result.profile.tool = nsight.run(session, session.baseline)
    if result.profile.tool is not None and result.profile.tool.reason:
        result.notes.append(f"{result.profile.tool.reason} {result.profile.tool.command}")
    disturbed += disputed
    result.notes += disturbed
    if apart := disagreement(found.traces):
        result.notes.append(apart)
    if not disturbed:  # else nothing follows from the shares
        result.profile.suggestion = suggestion(causes, members(session.baseline), settings=session.workload.remedies)
    reason = f"{causes[0].label.replace('_', ' ')} ({causes[0].why})" if causes else "no single bottleneck"
    if region := session.experiment.profile.region:
        reason = f"of the region {region}: {reason}"
    return Decision(Verdict.PROFILED, f"{reason}; not to be relied on: {disturbed[0]}" if disturbed else reason)


def predict(session: Session, arm: Client[Arm], found: Profile, disputed: Sequence[str]) -> None:
    """The gain that strategies can have, of the whole step.

    Args:
        disputed: Reasons to believe that the traced step is not the timed one; then nothing is predicted.
    """
    result = session.result
    if session.experiment.profile.region is not None:
        return
    if disputed:
        result.notes.append(UNTRUSTED)
        return
    view, timed_us, least = found.view, result.baseline.step_us, partial(least_us, session)
    result.profile.predictions = predicted(arm, view, session.baseline, found.calibration, timed_us, least)


def phases(setup: SetUp, following: Sequence[float], step_us: float | None) -> list[Phase]:
    """From the start of the process's own work to its steady steps.

    Args:
        following: Seconds of the steps after the first, each waited for.
        step_us: Of the timed blocks.
    """
    names = [f"{place} step" for place in ("second", "third")]
    later = [Phase(name, seconds) for name, seconds in zip(names, following, strict=True)]
    steady = [Phase("steady step", step_us / 1e6)] if step_us else []
    return [*(Phase(name, seconds) for name, seconds in setup.phases.items()), *later, *steady]


def timed_alone(session: Session, arm: Client[Arm]) -> list[str]:
    """Time the baseline, and fill in its figures; disturbances in words, none on a quiet machine.

    Raises:
        Distrusted: Other programs use the GPU, and that was not accepted.
    """
    refuse_company(session)
    gpu, since_s, met = session.machine.gpu, time.time(), dict[str, str]()
    read = session.looking_out(since_s, met)
    doing = "timing it as it is"
    with session.working("measurement", doing):
        tell = partial(session.progress.update, doing, total=session.settings.pairs)
        order = Random(session.draws.seed("pairs"))
        sample = sample_alone(arm, session.settings, order, read, session.workload.variety, tell)
    sample.foreign = tuple(met.values())
    if gpu and session.settings.load_s and sample.kept:
        with session.working("measurement", "utilisation of the card"):
            step_s = median(pair.baseline.wall_s for pair in sample.kept)
            sample.load["baseline"] = under_load(arm, gpu, step_s, session.settings.load_s)
    if not (limit := power_cap([sample])).ok:
        session.result.notes.append(f"{limit.name}: {limit.text}")
    allowed = session.experiment.environment.allow_foreign
    watches = [check([sample]) for check in DISTURBANCES if not (allowed and check is foreign)]
    found = [f"{watch.name}: {watch.text}" for watch in watches if not watch.ok]
    if not sample.kept:  # the card was slow in every block, which `throttling` has said
        sample.pairs = [replace(pair, readings=()) for pair in sample.pairs]
    summarize(session.result.baseline, "baseline", [sample], session.samples)
    times = sorted(pair.baseline.step_s for pair in sample.kept)
    tenth = len(times) // 10
    low, high = times[tenth], times[-1 - tenth]
    if high > WIDE * low:
        found.append(f"spread: a step takes {duration(low)} to {duration(high)} in eight of ten blocks")
    return found


def contradictions(traced_us: float | None, step_us: float | None, stretched: float | None) -> list[str]:
    """Disagreements between the steps that were timed and those that were traced, in words.

    Args:
        traced_us: A step of the traced process, before tracing began.
        step_us: A step of the timed blocks.
        stretched: A traced step, as a multiple of the same before tracing began.
    """
    found = []
    if traced_us and step_us and not 1 / WIDE <= traced_us / step_us <= WIDE:
        found.append(
            f"timing and trace disagree: a step takes {duration(step_us / 1e6)}, and {duration(traced_us / 1e6)} before"
            " it was traced: another program disturbed one of them"
        )
    if stretched is not None and stretched > DISTORTED:
        found.append(f"tracing made a step {stretched:.1f} times slower: shares of the host's time are the tracing's")
    return found
