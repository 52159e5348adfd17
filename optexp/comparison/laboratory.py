"""The laboratory of a search: profiles a stack, ranks the changes that may help, and measures trials."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import cloudpickle

from optexp.comparison.candidates import Candidate, candidates, grown, order, remedy
from optexp.comparison.compiler_evidence import logged
from optexp.comparison.first_look import LEAST
from optexp.comparison.goal import Goal
from optexp.comparison.known_baseline import KnownBaseline
from optexp.comparison.physics import find_work, least_us
from optexp.comparison.predictions import UNTRUSTED, disturbed, prediction
from optexp.comparison.profiles import Profile, advised, profile, show_where_time_goes
from optexp.comparison.screening import screened
from optexp.comparison.search import Proposal, Survey, why
from optexp.comparison.session import Session, alongside
from optexp.comparison.suggestions import installed
from optexp.comparison.timed_looks import TimedLooks, within
from optexp.comparison.trials import Trials
from optexp.errors import SPENT, Failure
from optexp.measurement.settings import MeasurementSettings
from optexp.profiling.view import View
from optexp.records.profile import Bottleneck
from optexp.records.trials import Trial, Untried
from optexp.strategy import Composed, Strategy, compose
from optexp.workers.arm import Arm
from optexp.workers.client import Client

ENDING = 0.05  # share of the budget in which a trial that is cut off may still be ending
USELESS = "the profiled program leaves it nothing to gain"


class Bench:
    """The laboratory of one job.

    Args:
        asked: A stack to try first; empty: none.
        meanwhile: Work of the parent while the first arm sets up.
    """

    def __init__(self, session: Session, asked: Sequence[Strategy], meanwhile: Callable[[], None]) -> None:
        self.session, self.asked, self.meanwhile = session, asked, meanwhile
        self.trials, self.rounds = Trials(session), 0
        self.begin_s = session.watch.begin + session.watch.seconds.get("wait", 0.0)  # imports count, waits do not
        self.brief_s = self.full_s = 0.0  # seconds of the longest brief trial, and of the longest other one
        self.verified = set[tuple[str, ...]]()  # labels of stacks that a trial has measured
        self.known: KnownBaseline | None = None  # the stack that was profiled last, if it is one of them
        self.refused = set[str]()  # changes of the stack that was profiled last that are UNSUPPORTED
        self.shares: dict[str, float] = {}  # of that stack's step, by the bottleneck's label
        self.limits: dict[str, list[Bottleneck]] = {}  # by change: of the stack that its last trial measured
        self.settings = session.settings
        self.brief = brief(self.settings)
        session.pool.until_s = self.begin_s + session.experiment.auto.budget_s
        slow = (module for strategy in self._allowed(())[0] for module in strategy.preload)
        session.pool.preload = {*session.pool.preload, *slow}  # most will be tried, by arms that would import it each

    def spent_s(self) -> float:
        return time.monotonic() - self.begin_s

    def trial_s(self) -> float:
        """The seconds of the longest trial of the next one's kind."""
        return self.full_s if self.brief is None else self.brief_s

    def last_s(self) -> float:
        """The seconds of the longest trial by the job's own measurement, or what a brief one tells of it."""
        if self.full_s or self.brief is None or not self.brief_s:
            return self.full_s
        return self.brief_s + self.settings.budget_s - self.brief.budget_s

    # --- survey --------------------------------------------------------------------------------------------------

    def survey(self, stack: Sequence[Strategy]) -> Survey:
        """Profile a stack in an arm of its own, and rank its changes.

        Raises:
            Failure: The baseline cannot be profiled; of a later stack the survey ends the search.
        """
        self.rounds += 1
        asked = bool(self.asked)  # it is tried before all else, and no other order is needed
        try:
            survey = self._survey(stack)
            return survey if asked else self._screened(survey, stack)
        except Failure as failure:
            if self.rounds == 1:
                raise
            return Survey([], ended=f"the stack that was kept could not be profiled again: {failure.message}")

    def _survey(self, stack: Sequence[Strategy]) -> Survey:
        session, name = self.session, f"round{self.rounds}"
        meanwhile, self.meanwhile = self.meanwhile, _nothing
        called = "+".join(Composed(stack).labels) or "the baseline"
        with session.working("arms", f"starting {called}"), alongside(meanwhile):
            starting = session.pool.start({name: logged(session, session.spec(stack), name)})[name]
            arm, setup = starting.arm, starting.setup.wait()
        session.learn(setup, [setup])
        with session.working("profile", f"round {self.rounds}: tracing a few steady steps"):
            found = profile(session, arm, name, brief=True)
            if not stack:
                find_work(session, arm)
            bottlenecks = advised(arm, found, stack)
            if self.rounds == 1:
                show_where_time_goes(session, {"baseline": found}, bottlenecks, [])
            survey = self._ranked(arm, found, stack, bottlenecks)
        known = tuple(Composed(stack).labels) in self.verified
        self.known = KnownBaseline(found, setup.setup_s, bottlenecks).elsewhere() if known else None
        arm.close()
        session.pool.end_workers()
        return survey

    def _screened(self, survey: Survey, stack: Sequence[Strategy]) -> Survey:
        """The survey in the order of first looks, which time objectives alone can follow."""
        session, settings = self.session, self.session.experiment.auto
        goal, end_s = Goal.of(settings), self.begin_s + settings.budget_s
        if settings.objective != "time" or not session.isolated:
            return survey
        try:
            with session.working("looks", "first looks at what may help"), within(session, end_s):
                looks = TimedLooks(session, stack)
                survey = screened(survey, stack, lambda proposal: not goal.hopeless(proposal.bound), looks, looks.gain)
        except Failure as failure:
            session.result.notes.append(f"no first looks: {failure}")
        session.pool.end_workers()
        self.refused |= {entry.change for entry in survey.left_out if entry.reason.startswith("UNSUPPORTED")}
        return survey

    def _ranked(
        self, arm: Client[Arm], found: Profile, stack: Sequence[Strategy], bottlenecks: Sequence[Bottleneck]
    ) -> Survey:
        among, left_out = self._allowed(stack)
        possible, refused = candidates(stack, among)
        left_out += refused
        helping = [c for c in possible if c.swaps or c.strategy.helps(found.trace, found.calibration)]
        left_out += [Untried(c.change, USELESS) for c in possible if c not in helping]
        refusals = arm.call(Arm.refusals, packed=cloudpickle.dumps([c.strategy for c in helping])) if helping else []
        left_out += [Untried(c.change, f"UNSUPPORTED: {r}") for c, r in zip(helping, refusals, strict=True) if r]
        fitting = [c for c, reason in zip(helping, refusals, strict=True) if not reason]
        self.shares = {bottleneck.label: bottleneck.share for bottleneck in bottlenecks}
        self.refused = {c.change for c, reason in zip(helping, refusals, strict=True) if reason}
        view = self._trusted(found)
        proposals = [self._proposed(c, found, view, bottlenecks) for c in fitting]
        proposals.sort(key=lambda pair: pair[0])
        asked, self.asked = self.asked, ()
        first = [Proposal("+".join(Composed(asked).labels), compose(asked), why="asked for")] if asked else []
        return Survey([*first, *(proposal for _, proposal in proposals)], left_out)

    def _trusted(self, found: Profile) -> View | None:
        """The view that bounds follow from; None, with a note, where tracing hides the step's own work."""
        view, notes = found.view, self.session.result.notes
        if not disturbed(view, found.trace.timed_us or view.breakdown.wall_us):
            return view
        notes += [UNTRUSTED] if UNTRUSTED not in notes else []
        return None

    def _proposed(
        self, c: Candidate, found: Profile, view: View | None, bottlenecks: Sequence[Bottleneck]
    ) -> tuple[tuple[float, ...], Proposal]:
        """A candidate as a proposal, and its place among them; without a bound where the profile is disturbed."""
        foretold = None
        if view is not None and not c.swaps:  # of other options of a member nothing is predicted
            least = least_us(self.session, Composed(c.stack).contract)
            foretold = prediction(c.typed, c.strategy, view, found.calibration, found.trace.timed_us, least)
        bound, assumption = (foretold.speedup, foretold.text) if foretold else (None, "")
        causes = list(dict.fromkeys(cause for _, _, cause in c.answers(bottlenecks)))
        return order(c, bound, bottlenecks), Proposal(c.change, c.stack, bound, why(bound, assumption, causes))

    def _allowed(self, stack: Sequence[Strategy]) -> tuple[list[Strategy], list[Untried]]:
        """Strategies that the search may try, and those that the user took out."""
        settings = self.session.experiment.auto
        taken = [s for s in installed() if settings.allows(s.name)]
        names = {strategy.name for strategy in (*taken, *stack)}
        return taken, [
            Untried(s.name, "left out by auto.among or auto.without") for s in installed() if s.name not in names
        ]

    # --- trials --------------------------------------------------------------------------------------------------

    def quick(self, proposal: Proposal, against: Sequence[Strategy]) -> Trial:
        return self._trial(proposal, against, self.brief or self.settings)

    def thorough(self, proposal: Proposal, against: Sequence[Strategy]) -> Trial | None:
        return None if self.brief is None else self._trial(proposal, against, self.settings)

    def companion(self, proposal: Proposal) -> Proposal | None:
        limits = grown(self.shares, self.limits.get(proposal.change, []))
        allowed = [s for s in self._allowed(proposal.stack)[0] if s.label not in self.refused]
        found = remedy(proposal.stack, allowed, limits)
        if found is None:
            return None
        limit = f"a remedy for {found.answers(limits)[0][2].replace('_', ' ')}, which limits {proposal.change}"
        return Proposal(f"{proposal.change}+{found.change}", found.stack, why=limit)

    def _trial(self, proposal: Proposal, against: Sequence[Strategy], settings: MeasurementSettings) -> Trial:
        kept, full = self.rounds > 1, settings is self.settings
        longer = full and self.brief is not None
        known = not against or self.known is not None  # a first look needs the baseline's time
        budget_s = self.session.experiment.auto.budget_s
        until_s = self.begin_s + budget_s - (self.last_s() + ENDING * budget_s if kept else 0.0)
        trial, result = self.trials.compare(
            proposal.stack,
            against,
            settings,
            details=False,
            known_baseline=self.known,
            until_s=until_s,
            longer=longer,
            looks=self._looks(proposal) and known and not longer,
        )
        self.limits[proposal.change] = result.profile.bottlenecks
        if result.error is not None and result.error.type == SPENT:
            trial = replace(trial, reason=f"auto.budget was spent{' but for the last measurement' if kept else ''}")
        elif trial.verdict.measured and trial.looked is None:
            self.verified.add(tuple(Composed(proposal.stack).labels))
            self.full_s = max(self.full_s, trial.seconds if full else 0.0)
            self.brief_s = max(self.brief_s, 0.0 if full else trial.seconds)
        return replace(trial, change=proposal.change, predicted=proposal.bound, why=proposal.why)

    def _looks(self, proposal: Proposal) -> bool:
        """Whether a trial begins with a first look: not where an earlier look showed the stack to be no slower."""
        slower = proposal.looked is None or proposal.looked < LEAST
        return self.session.experiment.auto.objective == "time" and slower


def _nothing() -> None:
    return


def brief(settings: MeasurementSettings) -> MeasurementSettings | None:
    """Settings of a brief trial, at most those of the quick preset; None where `settings` ask for no more."""
    short = replace(
        settings,
        preset="quick",
        processes_min=1,
        processes_max=1,
        pairs=min(settings.pairs, 30),
        confidence=min(settings.confidence, 0.99),  # the blocks of one process give no more
        budget_s=min(settings.budget_s, 10.0),
        controls=False,
        confirm=False,
        load_s=min(settings.load_s, 0.5),
    )
    return None if short == settings else short
