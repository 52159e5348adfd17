"""mode=auto: search for the best stack.

profile ──▶ rank ──▶ look ──▶ try: verify, measure ──▶ keep what is FASTER ──▶ profile again ...
        ──▶ measure the winner anew
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from optexp.comparison import runner
from optexp.comparison.adjudicate import Exhausted, Facts, adjudicate
from optexp.comparison.decision import decide
from optexp.comparison.goal import Budget, Goal
from optexp.comparison.hand_over import hand_over
from optexp.comparison.laboratory import Bench
from optexp.comparison.modes import compare
from optexp.comparison.search import Searched, search
from optexp.comparison.session import Session
from optexp.errors import SPENT, ConfigError, Failure
from optexp.measurement.statistics import holm
from optexp.records.trials import Search, Trial
from optexp.reporting.wording import agreeing
from optexp.result import Verdict
from optexp.strategy import Composed
from optexp.support.units import at_least, duration


def run(session: Session, facts: Facts, meanwhile: Callable[[], None]) -> None:
    """Search, then compare the winner with the baseline in new processes; the verdict is that comparison's.

    Raises:
        ConfigError: The objective cannot be measured here, or nothing would decide a verdict.
        Unsupported, NoReference, Distrusted, Failure: The baseline, or the last measurement, ended early.
    """
    settings = session.experiment.auto
    refuse(session)
    goal = Goal.of(settings)
    asked, session.stack = session.stack, Composed([])
    bench = Bench(session, asked, meanwhile)
    session.progress.phase("search", "looking for the best stack, which is measured anew at the end")
    found = search(bench, goal, Budget(settings.budget_s, settings.trials), session.baseline)
    seconds, result = bench.spent_s(), session.result
    result.trials = found.trials
    kept = any(trial.kept for trial in found.trials)
    in_time = seconds + bench.last_s() < settings.budget_s
    problem: Exception | None = None
    session.choose(found.stack if kept else [])
    if kept:
        try:
            if in_time:
                measure_anew(session, facts, found)
        except Exception as error:  # the search is told all the same
            in_time = not (isinstance(error, Failure) and error.type == SPENT)
            problem = error if in_time else None
        if not in_time:
            facts.not_anew = not_anew(found.trials, duration(settings.budget_s))
            facts.measurement = result.measurement = result.speedup = None
    else:
        facts.exhausted = Exhausted.of(found.trials, settings.min_gain)
    settled = adjudicate(Facts(problem=runner.problem(problem)) if problem else facts)
    choice = decide(result, settled.verdict if settled else Verdict.ERROR, goal, session.contract, kept)
    result.search = Search(
        settings.objective,
        goal.constraints,
        stack=list(session.stack.labels) if kept else [],
        decision=choice.text,
        ended=found.ended,
        seconds=round(seconds, 1),
        untried=found.untried,
        not_anew=facts.not_anew,
        yaml=hand_over(session) if choice.use else "",
        looks=found.looks,
    )
    result.profile.suggestion = None  # the search has tried it
    if problem:
        raise problem


def not_anew(trials: Sequence[Trial], budget: str) -> str:
    """The gain of each kept trial: the only figures of a winner that was not measured anew."""
    gains = [f"{t.change} at least {at_least(t.gain.low)}×" for t in trials if t.kept and t.gain]
    return f"not measured anew: the budget of {budget} was spent; its trials showed {', then '.join(gains)}"


def refuse(session: Session) -> None:
    """`ConfigError` where a search could not decide."""
    if session.settings.trials:
        raise ConfigError("mode=auto needs intervals: leave measurement=textbook out")
    if session.experiment.auto.objective == "energy" and session.machine.gpu is None:
        raise ConfigError("auto.objective=energy reads the meter of an NVIDIA GPU, and there is none here: use time")
    if session.experiment.auto.objective == "energy" and not session.settings.load_s:
        raise ConfigError("auto.objective=energy needs measurement.load_s to be more than 0")


def measure_anew(session: Session, facts: Facts, found: Searched) -> None:
    """Compare the winner with the baseline, on other inputs; its claim must hold among all that were made."""
    session.progress.phase("winner", "measuring the winner anew")
    compare.run(session, facts, lambda: None)
    alone, measurement = adjudicate(facts), facts.measurement
    if measurement is None or measurement.p_value is None:
        return
    p_values = [measurement.p_value, *(t.p_value for t in found.trials if t.p_value is not None)]
    measurement.p_holm, measurement.comparisons = holm(p_values)[0], len(p_values)
    corrected = adjudicate(facts)
    if alone and corrected and corrected.verdict is not alone.verdict:
        session.result.explanation = agreeing(corrected.verdict, session.result.explanation, session.result.profile)
