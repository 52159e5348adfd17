"""The one place that decides a verdict: facts of a comparison in, verdict and reason out. Pure; needs no torch.

The comparison itself, a sweep's correction for many comparisons, and the offline audit all call `adjudicate`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import log

from optexp.errors import FORGED, SPENT, UNTIMED
from optexp.measurement import statistics
from optexp.records.measurement import Measurement
from optexp.records.trials import Trial, not_verified
from optexp.records.verification import Verification
from optexp.result import Engagement, Problem, Result, Verdict, against_itself

ENDINGS = {  # by the class of the exception that ended a comparison; any other is an ERROR
    "Unsupported": Verdict.UNSUPPORTED,
    "NoReference": Verdict.UNVERIFIED,
    "Distrusted": Verdict.INVALID,
    "Hopeless": Verdict.INCONCLUSIVE,
    FORGED: Verdict.INVALID,
    SPENT: Verdict.INCONCLUSIVE,
    UNTIMED: Verdict.INVALID,
}


@dataclass
class Examined:
    """One stack before its timing.

    distrust:   reason to believe no measurement of its process; empty where there is none
    unreadable: the same reason holds for its results
    prefix:     of reasons that are about this stack
    """

    verification: Verification
    evidence: Sequence[Engagement] = ()
    distrust: str = ""
    unreadable: bool = False
    prefix: str = ""


@dataclass(frozen=True)
class Exhausted:
    """A search that kept nothing.

    tried: verdicts of its trials
    open:  one of the last trials of a change left open whether it gains
    """

    tried: Sequence[Verdict]
    open: bool

    @classmethod
    def of(cls, trials: Sequence[Trial], min_gain: float) -> Exhausted:
        """The facts that its trials hold.

        Args:
            min_gain: A share; smaller gains were not looked for.
        """
        last = {trial.change: trial for trial in trials}.values()
        undecided = (t.gain for t in last if t.verdict is Verdict.INCONCLUSIVE and t.looked is None)
        gains = any(gain is None or (gain.high is None or gain.high >= 1 + min_gain) for gain in undecided)
        return cls([trial.verdict for trial in last], gains)


@dataclass
class Facts:
    """Everything that a verdict follows from; filled as a comparison goes on.

    problem:    the exception that ended it
    exhausted:  a search that kept nothing
    not_anew:   why a search's winner was not measured anew; empty where it was
    examined:   the candidate, and a baseline that is a stack itself
    untimed:    nothing is to be timed (`verify=only`)
    itself:     both arms are the same program
    """

    problem: Problem | None = None
    exhausted: Exhausted | None = None
    not_anew: str = ""
    examined: list[Examined] = field(default_factory=list)
    untimed: bool = False
    measurement: Measurement | None = None
    confidence: float = 0.99
    itself: bool = False

    @property
    def interval(self) -> statistics.Interval | None:
        """Of the log-ratio, over processes."""
        if self.measurement is None or not self.measurement.pairs:
            return None
        return statistics.interval(log_ratios(self.measurement), self.confidence, self.measurement.spread)


@dataclass(frozen=True)
class Decision:
    """A verdict and its reason, as the end of a headline; a measured verdict has its figures instead.

    alone: the measured verdict before the correction for many comparisons, which it did not survive; else None
    """

    verdict: Verdict
    reason: str = ""
    alone: Verdict | None = None


def adjudicate(facts: Facts) -> Decision | None:
    """The first rule that applies; None where a measurement is still to come."""
    return next((decision for rule in RULES if (decision := rule(facts))), None)


def facts_of(result: Result) -> Facts:
    """The facts that a record holds."""
    searched, min_gain = result.search, result.config.get("auto.min_gain", 0.0)
    examined = [Examined(result.equivalence, result.evidence)] if result.equivalence else []
    looked = result.first_look
    return Facts(
        problem=result.error or (None if looked is None else Problem("Hopeless", not_verified(looked))),
        exhausted=Exhausted.of(result.trials, min_gain) if searched and not searched.stack else None,
        not_anew=searched.not_anew if searched else "",
        examined=examined,
        untimed=result.config.get("verify") == "only",
        measurement=result.measurement,
        confidence=result.speedup.confidence if result.speedup else result.config.get("measurement.confidence", 0.99),
        itself=against_itself(result.config),
    )


def log_ratios(measurement: Measurement) -> list[list[float]]:
    """By process, of every pair that counts."""
    return [[log(before / after) for before, after in process] for process in measurement.pairs]


# --- rules, first that applies -----------------------------------------------------------------------------------


def ended(facts: Facts) -> Decision | None:
    if (problem := facts.problem) is None:
        return None
    verdict = ENDINGS.get(problem.type, Verdict.ERROR)
    named = problem.worker and problem.type not in ("ConfigError", "NoReference", "Unsupported")
    return Decision(verdict, f"{problem.worker}: {problem.message}" if named else problem.message)


def nothing_kept(facts: Facts) -> Decision | None:
    """A search without a winner. The baseline is as fast as the best stack, unless a trial left that open."""
    if (found := facts.exhausted) is None:
        return None
    count = f"{len(found.tried)} change{'' if len(found.tried) == 1 else 's'} tried"
    if any(verdict.measured for verdict in found.tried):
        if found.open:
            return Decision(Verdict.INCONCLUSIVE, f"the search kept nothing: {count}, not all of them decided")
        return Decision(Verdict.SAME, f"the search kept nothing: {count}, and nothing gained")
    refused = (
        v for v in (Verdict.INVALID, Verdict.ERROR, Verdict.UNVERIFIED, Verdict.NOT_EQUIVALENT) if v in found.tried
    )
    return Decision(
        next(refused, Verdict.UNSUPPORTED), f"the search kept nothing: {count}, and nothing could be measured"
    )


def not_engaged(facts: Facts) -> Decision | None:
    for stack in facts.examined:
        prefix = "the baseline's " if stack.prefix else ""
        if missing := [proof for proof in stack.evidence if not proof.engaged]:
            return Decision(Verdict.NOT_ENGAGED, "; ".join(f"{prefix}{p.strategy}: {p.text}" for p in missing))
    return None


def unreadable(facts: Facts) -> Decision | None:
    """Results that may not be the computed ones prove nothing about equivalence."""
    return next((Decision(Verdict.INVALID, s.distrust) for s in facts.examined if s.unreadable and s.distrust), None)


def not_equivalent(facts: Facts) -> Decision | None:
    wrong = (s for s in facts.examined if not s.verification.ok)
    return next((Decision(Verdict.NOT_EQUIVALENT, s.prefix + s.verification.headline) for s in wrong), None)


def undecided(facts: Facts) -> Decision | None:
    unsure = (s for s in facts.examined if s.verification.undecided)
    return next((Decision(Verdict.UNVERIFIED, s.prefix + s.verification.undecided) for s in unsure), None)


def distrusted(facts: Facts) -> Decision | None:
    return next((Decision(Verdict.INVALID, s.distrust) for s in facts.examined if s.distrust), None)


def verified(facts: Facts) -> Decision | None:
    return Decision(Verdict.VERIFIED) if facts.untimed and facts.examined else None


def not_anew(facts: Facts) -> Decision | None:
    return Decision(Verdict.INCONCLUSIVE, facts.not_anew) if facts.not_anew else None


def textbook(facts: Facts) -> Decision | None:
    """A measurement of the usual kind decides nothing."""
    found = facts.measurement.textbook if facts.measurement else None
    return Decision(Verdict.INCONCLUSIVE, found.text) if found else None


def unproven(facts: Facts) -> Decision | None:
    if facts.measurement is None or facts.examined:
        return None
    return Decision(Verdict.UNVERIFIED, "there is no record of a verification")


def refused(facts: Facts) -> Decision | None:
    """Watchdogs and controls that refuse the measurement, and a program that differs from itself."""
    if (measurement := facts.measurement) is None:
        return None
    wrong = [watch.text for watch in measurement.watchdogs if watch.refuses]
    wrong += [f"{name}: {control.text}" for name, control in measurement.controls.items() if not control.ok]
    interval = facts.interval
    if facts.itself and interval and _own(measurement, interval, facts.confidence) in (Verdict.FASTER, Verdict.SLOWER):
        wrong.append(f"the same program differs from itself by {abs(interval.estimate):.1%}: the machine disturbs")
    return Decision(Verdict.INVALID, "; ".join(wrong)) if wrong else None


def measured(facts: Facts) -> Decision | None:
    """The interval's own verdict, unless a watchdog leaves it open or it is lost among many comparisons."""
    measurement, interval = facts.measurement, facts.interval
    if measurement is None or interval is None:
        return None
    own = _own(measurement, interval, facts.confidence)
    claims = own in (Verdict.FASTER, Verdict.SLOWER)
    if claims and measurement.p_holm is not None and measurement.p_holm >= 1 - facts.confidence:
        reason = f"one of {measurement.comparisons or 'several'} comparisons (Holm: p = {measurement.p_holm:.2g})"
        return Decision(Verdict.INCONCLUSIVE, reason, own)
    return Decision(own)


def _own(measurement: Measurement, interval: statistics.Interval, confidence: float) -> Verdict:
    """The verdict of pairs and watchdogs by themselves."""
    if any(watch.undecides for watch in measurement.watchdogs):
        return Verdict.INCONCLUSIVE
    if len(measurement.pairs) == 1:
        blocks = statistics.over_blocks(log_ratios(measurement)[0], confidence)
        if statistics.too_noisy(blocks):
            return Verdict.INCONCLUSIVE
    return statistics.decide(interval, measurement.min_effect)


RULES: tuple[Callable[[Facts], Decision | None], ...] = (
    ended,
    nothing_kept,
    not_engaged,
    unreadable,
    not_equivalent,
    undecided,
    distrusted,
    verified,
    not_anew,
    textbook,
    unproven,
    refused,
    measured,
)
