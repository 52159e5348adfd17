"""mode=ablate: which member of a stack gives what.

the whole stack, compared as by mode=compare ──▶ its subsets, each a trial ──▶ cumulative, leave-one-out, Shapley
"""

from __future__ import annotations

from collections.abc import Callable

from optexp.comparison import runner
from optexp.comparison.adjudicate import Facts, adjudicate, log_ratios
from optexp.comparison.contributions import MOST, Subset, Values, ablation, subsets
from optexp.comparison.modes import compare
from optexp.comparison.session import Session
from optexp.comparison.trials import Trials, figures, gain
from optexp.errors import ConfigError, Unsupported
from optexp.measurement.contrast import Uncertain, of_processes
from optexp.measurement.settings import MeasurementSettings
from optexp.records.measurement import Measurement
from optexp.records.trials import Trial
from optexp.result import Verdict
from optexp.strategy import Composed, Strategy, compose


def run(session: Session, facts: Facts, meanwhile: Callable[[], None]) -> None:
    """Compare the whole stack, then its subsets; the verdict is that of the whole stack.

    Raises:
        ConfigError: There is no stack of several members, or nothing would decide a verdict.
        Unsupported, NoReference, Distrusted, Failure: The comparison of the whole stack ended early.
    """
    settings, members = session.settings, dict(zip(session.stack.labels, session.stack, strict=True))
    if len(members) < 2:
        raise ConfigError("mode=ablate takes a stack apart: name at least two strategies, as in strategy=[amp,fusion]")
    if settings.trials:
        raise ConfigError("mode=ablate needs intervals: leave measurement=textbook out")
    problem: Exception | None = None
    try:
        compare.run(session, facts, meanwhile)
    except Exception as error:  # its parts may still be compared
        problem = error
    whole = Whole(session, facts, problem)
    found, result = whole.trial, session.result
    result.trials = [found]
    names = list(members)
    speedups, reasons = dict[Subset, Uncertain](), dict[Subset, str]()
    _enter(frozenset(names), found, facts.measurement, settings, speedups, reasons)
    trials = Trials(session)
    for subset in subsets(names):
        stack = [members[name] for name in names if name in subset]
        trial, measurement = _compared(trials, stack, session, len(result.trials))
        result.trials.append(trial)
        _enter(subset, trial, measurement, settings, speedups, reasons)
    values = Values(names, speedups, reasons, settings.confidence, settings.min_effect)
    result.ablation = ablation(values)
    if len(names) > MOST:
        result.notes.append(f"ablate: {result.ablation.no_shapley}")
    if problem is not None:
        raise problem


class Whole:
    """The comparison of the whole stack as one of the trials."""

    def __init__(self, session: Session, facts: Facts, problem: Exception | None) -> None:
        ended = facts if problem is None else Facts(problem=runner.problem(problem))
        decision, result = adjudicate(ended), session.result
        verdict = decision.verdict if decision else Verdict.ERROR
        measured = verdict.measured
        self.trial = Trial(
            0,
            stack=list(session.stack.labels),
            against=list(session.baseline.labels),
            verdict=verdict,
            reason="" if measured or decision is None else decision.reason,
            gain=gain(result.speedup) if measured else None,
            candidate=figures(result.candidate if measured else result.candidate.untimed()),
            baseline=figures(result.baseline if measured else result.baseline.untimed()),
            p_value=facts.measurement.p_value if measured and facts.measurement else None,
            preset=session.settings.preset,
            folder=".",
            seconds=round(session.watch.total, 1),
        )


def _compared(trials: Trials, stack: list[Strategy], session: Session, number: int) -> tuple[Trial, Measurement | None]:
    """One subset; one that cannot be composed needs no process to say so."""
    try:
        compose(stack)
    except Unsupported as reason:
        labels = list(Composed(stack).labels)
        return Trial(number, labels, list(session.baseline.labels), Verdict.UNSUPPORTED, str(reason)), None
    trial, result = trials.compare(stack, session.baseline, session.settings, details=False)
    return trial, result.measurement


def _enter(
    subset: Subset,
    trial: Trial,
    measurement: Measurement | None,
    settings: MeasurementSettings,
    speedups: dict[Subset, Uncertain],
    reasons: dict[Subset, str],
) -> None:
    """A trial's log-speedup, or why there is none; the table of trials has the reason itself."""
    if trial.verdict.measured and measurement is not None and measurement.pairs:
        speedups[subset] = of_processes(log_ratios(measurement), settings.confidence, measurement.spread)
    else:
        reasons[subset] = f"{trial.verdict} (trial {trial.number})"
