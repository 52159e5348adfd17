"""mode=compare: examine the candidate, time both arms in turn, check the timed process, measure.

config ──▶ arms ──▶ verification ──▶ profile (evidence) ──▶ measurement ──▶ verification of the timed process
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from optexp.comparison import predictions, textbook
from optexp.comparison.adjudicate import Facts, adjudicate
from optexp.comparison.after_timing import verify_timed
from optexp.comparison.compiler_evidence import name_breaks
from optexp.comparison.conclusion import conclude
from optexp.comparison.evaluation import Evaluation, examine, members
from optexp.comparison.explained import explain_the_timed
from optexp.comparison.known_baseline import KnownBaseline
from optexp.comparison.measure import Timed, measure, refuse_company, say_how_to_lock
from optexp.comparison.physics import drop_beaten, least_us
from optexp.comparison.profiles import show_where_time_goes
from optexp.comparison.session import Session
from optexp.comparison.suggestions import suggestion
from optexp.errors import Failure, Unsupported
from optexp.profiling.explanation import difference, explain
from optexp.records.profile import Bottleneck
from optexp.result import Verdict, against_itself
from optexp.strategy import compose
from optexp.support.shortage import OUT_OF_MEMORY

ADVICE = "so it did with {tried}: use smaller inputs, or a device with more memory"


def run(session: Session, facts: Facts, meanwhile: Callable[[], None]) -> None:
    """Fill in the facts and the session's result. A comparison that runs out of memory starts again with less.

    meanwhile: work of the parent while the first arms set up; only the first attempt does it

    Raises:
        Unsupported, NoReference, Distrusted, Failure: The comparison ends early; `adjudicate` knows the verdict.
    """
    while True:
        try:
            return compare_once(session, facts, meanwhile)
        except Failure as failure:
            if not session.retry_with_less_memory(failure):
                if session.tried and failure.type == OUT_OF_MEMORY:
                    failure.message += f" ({ADVICE.format(tried='; '.join(session.tried))})"
                raise
        facts.examined, facts.measurement = [], None
        meanwhile = _nothing  # the first attempt has done it


def _nothing() -> None:
    return


def compare_once(session: Session, facts: Facts, meanwhile: Callable[[], None]) -> None:
    result = session.result
    for stack in (session.stack, session.baseline):
        for strategy in compose(stack):  # raises Unsupported before an arm starts
            if reason := strategy.unsupported_on(torch.device(session.device)):
                raise Unsupported(f"{strategy.name}: {reason}")
    refuse_company(session)
    candidate = examine(session, session.stack, "candidate", meanwhile)
    # A baseline stack is examined like the candidate, once: a ratio to a wrong or inactive baseline is worthless.
    unknown = session.baseline and session.known_baseline is None
    baseline = examine(session, session.baseline, "baseline") if unknown else None
    known = session.known_baseline or KnownBaseline.of(candidate, baseline)
    causes = known.bottlenecks
    result.baseline.setup_s = known.setup_s
    result.candidate.setup_s = candidate.setups["stacked"]
    show_where_time_goes(
        session, {"baseline": known.profile, "candidate": candidate.stacked}, candidate.bottlenecks, candidate.checks
    )
    result.profile.suggestion = next_step(session, causes, candidate.bottlenecks, helps=False)
    views = known.profile.view, candidate.stacked.view
    result.profile.difference = difference(*views)
    result.explanation = explain(*views, result.profile.difference)
    result.evidence, result.equivalence = candidate.evidence, candidate.verification
    name_breaks(result)
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
        drop_beaten(session)
        result.explanation, result.profile.difference = [], None
        say_how_to_lock(session)
    else:

        def verified(timed: Timed) -> bool:
            verify_timed(candidate.referee, timed.arms, timed.samples)
            return adjudicate(facts) is None

        timed = measure(session, verified)
        if adjudicate(facts):  # the timed process is not the verified one
            return
        candidate.referee.leave()
        settle(session, facts, timed, candidate, known)


def settle(session: Session, facts: Facts, timed: Timed, candidate: Evaluation, known: KnownBaseline) -> None:
    """From timed blocks to the measurement, what explains it, and the next step."""
    result, views = session.result, (known.profile.view, candidate.stacked.view)
    conclude(session, facts, timed)
    drop_beaten(session)
    decision = adjudicate(facts)
    verdict = decision.verdict if decision else Verdict.ERROR
    explain_the_timed(result, verdict, views)
    if verdict.measured and session.experiment.profile.region is None:
        stacks, least = (session.baseline, session.stack), least_us(session, session.contract)
        predictions.set_beside(result, *stacks, views[0], known.profile.calibration, least)
    helps = verdict is not Verdict.SLOWER and result.speedup is not None and result.speedup.estimate >= 1
    result.profile.suggestion = next_step(session, known.bottlenecks, candidate.bottlenecks, helps)


def next_step(session: Session, before: Sequence[Bottleneck], after: Sequence[Bottleneck], helps: bool) -> str | None:
    """A stack that helps gets a remedy for its largest remaining bottleneck; else the baseline gets another remedy.

    before: the baseline's bottlenecks
    after:  the candidate's bottlenecks
    """
    settings = session.workload.remedies
    if helps:
        return suggestion(after, members(session.stack or session.baseline), settings=settings)
    return suggestion(before, members(session.baseline), members(session.stack), settings)
