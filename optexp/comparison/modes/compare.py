"""mode=compare: examine the candidate, time both arms in turn, check the timed process, measure.

config ──▶ arms ──▶ verification ──▶ profile (evidence) ──▶ measurement ──▶ verification of the timed process
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optexp.comparison import textbook
from optexp.comparison.adjudicate import Facts, adjudicate
from optexp.comparison.after_timing import verify_timed
from optexp.comparison.conclusion import conclude
from optexp.comparison.evaluation import examine, members
from optexp.comparison.measure import explain_the_host, judge_controls, refuse_company, rounds, say_how_to_lock, timing
from optexp.comparison.profiles import show_where_time_goes
from optexp.comparison.session import Session
from optexp.comparison.suggestions import suggestion
from optexp.errors import Failure
from optexp.profiling.explanation import explain
from optexp.records.profile import Bottleneck
from optexp.reporting.wording import agreeing
from optexp.result import Verdict, against_itself
from optexp.strategy import compose

ADVICE = "so it did with {tried}: use smaller inputs, or a device with more memory"


def run(session: Session, facts: Facts, meanwhile: Callable[[], None]) -> None:
    """Fill in the facts and the session's result; where memory runs out, once more with less of it.

    Raises:
        Unsupported, NoReference, Distrusted, Failure: The comparison ends early; `adjudicate` knows the verdict.
    """
    while True:
        try:
            return compare_once(session, facts, meanwhile)
        except Failure as failure:
            if not session.spare(failure):
                if session.tried and failure.type == "OutOfMemoryError":
                    failure.message += f" ({ADVICE.format(tried='; '.join(session.tried))})"
                raise
        facts.examined, facts.measurement = [], None
        meanwhile = _nothing  # it is done


def _nothing() -> None:
    return


def compare_once(session: Session, facts: Facts, meanwhile: Callable[[], None]) -> None:
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
    show_where_time_goes(
        session, {"baseline": before, "candidate": candidate.stacked}, candidate.bottlenecks, candidate.checks
    )
    causes = baseline.bottlenecks if baseline else candidate.bare_bottlenecks
    result.profile.suggestion = next_step(session, causes, candidate.bottlenecks, helps=False)
    result.explanation = explain(before.trace, candidate.stacked.trace, before.breakdown, candidate.stacked.breakdown)
    result.evidence, result.equivalence = candidate.evidence, candidate.verification
    facts.examined = [candidate.facts(), *([baseline.facts("the baseline itself: ")] if baseline else [])]
    facts.itself = against_itself(result.config)
    if adjudicate(facts):
        return
    session.refuse_edits()
    if baseline:
        baseline.referee.leave()
    if session.experiment.verify == "only":
        facts.untimed = True
        result.profile.suggestion = next_step(session, causes, candidate.bottlenecks, helps=True)
        say_how_to_lock(session)
    elif session.settings.trials:
        textbook.measure(session, facts)
        result.explanation = []
        say_how_to_lock(session)
    else:
        with timing(session) as timed:
            rounds(session, timed)
            verify_timed(candidate.referee, timed.arms, timed.samples)
            timed.close_arms()
            if adjudicate(facts):  # the timed process is not the verified one
                return
            judge_controls(session, timed)
            explain_the_host(session, timed)
        session.refuse_edits()
        candidate.referee.leave()
        conclude(session, facts, timed)
        decision = adjudicate(facts)
        verdict = decision.verdict if decision else Verdict.ERROR
        result.explanation = agreeing(verdict, result.explanation, result.profile)
        helps = verdict is not Verdict.SLOWER and result.speedup is not None and result.speedup.estimate >= 1
        result.profile.suggestion = next_step(session, causes, candidate.bottlenecks, helps)


def next_step(session: Session, before: Sequence[Bottleneck], after: Sequence[Bottleneck], helps: bool) -> str | None:
    """Beside a stack that helps, the remedy of what still holds it back; else another one, for the baseline.

    before, after: bottlenecks of both arms
    """
    if helps:
        return suggestion(after, members(session.stack or session.baseline))
    return suggestion(before, members(session.baseline), without=members(session.stack))
