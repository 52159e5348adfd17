"""The loop of mode=auto: survey, try, keep, survey again. Pure; a laboratory does the work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from optexp.comparison.goal import Budget, Goal
from optexp.records.prediction import ABOVE
from optexp.records.trials import Look, Trial, Untried
from optexp.records.verdict import Verdict
from optexp.strategy import Strategy
from optexp.support.units import ratio

SHORT = 1.2  # times what was measured: a prediction that lies further above it was kept from coming true
GREW = 1.02  # times what was predicted before: then a change that was rejected is tried again


@dataclass(frozen=True)
class Proposal:
    """A change of the stack, to be tried.

    change: label of the strategy that is added, or whose options change
    stack:  with the change, in the order of its stages
    bound:  largest speedup that the profile predicts; None without one
    why:    prediction, diagnosis or first looks in words
    looked: speedup in a first look; None without one
    """

    change: str
    stack: Sequence[Strategy]
    bound: float | None = None
    why: str = ""
    looked: float | None = None


@dataclass(frozen=True)
class Survey:
    """Trials that the profile of a stack proposes, the most promising first, and those that it leaves out.

    ended: why there is no profile, which ends the search
    looks: first looks at what is proposed
    """

    proposals: list[Proposal]
    left_out: list[Untried] = field(default_factory=list)
    ended: str = ""
    looks: list[Look] = field(default_factory=list)


class Laboratory(Protocol):
    """Profiles and measures."""

    def survey(self, stack: Sequence[Strategy]) -> Survey:
        """Profile a stack."""

    def quick(self, proposal: Proposal, against: Sequence[Strategy]) -> Trial:
        """Verify and measure briefly."""

    def thorough(self, proposal: Proposal, against: Sequence[Strategy]) -> Trial | None:
        """The same, by the job's own measurement; None where a quick trial is that already."""

    def companion(self, proposal: Proposal) -> Proposal | None:
        """The same change with a remedy for what limits it; None where its trial met no other limit than before."""

    def spent_s(self) -> float:
        """Seconds since the search began."""

    def trial_s(self) -> float:
        """Seconds that the next trial will take, as far as earlier ones tell."""

    def last_s(self) -> float:
        """Seconds that measuring the winner anew will take, as far as trials tell."""


@dataclass
class Searched:
    """Where a search stands.

    stack:   kept so far
    gained:  its speedup: the product of what was measured
    ended:   why the search ended
    untried: changes that were never tried
    looks:   first looks, by which trials were ordered
    """

    stack: Sequence[Strategy]
    gained: float = 1.0
    trials: list[Trial] = field(default_factory=list)
    ended: str = ""
    untried: list[Untried] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)


def search(laboratory: Laboratory, goal: Goal, budget: Budget, start: Sequence[Strategy]) -> Searched:
    """From `start`, keep what brings the goal nearer, until nothing is predicted to, or the budget is spent."""
    return _Loop(laboratory, goal, budget, Searched(start)).run()


@dataclass
class _Loop:
    """State.

    tried:     by change, what was predicted then
    cut:       changes that end a branch
    disturbed: changes that were INVALID once, or looked faster undecided, which may be the machine's fault
    """

    laboratory: Laboratory
    goal: Goal
    budget: Budget
    found: Searched
    tried: dict[str, float | None] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    disturbed: set[str] = field(default_factory=set)

    def run(self) -> Searched:
        found = self.found
        while not found.ended:
            survey = self.laboratory.survey(found.stack)
            found.looks += survey.looks
            left = {entry.change: entry for entry in survey.left_out}
            found.ended = survey.ended
            kept = self._round(survey.proposals, left)
            if kept and (reason := self._spent()):
                found.ended = reason
                self._leave(survey.proposals, reason, left)
            elif not kept and not found.ended:
                found.ended = f"nothing is left that may gain {100 * self.goal.min_gain:.2g} %"
            seen = {trial.change for trial in found.trials}
            found.untried = [entry for change, entry in left.items() if change not in seen]
        return found

    def _round(self, proposals: Sequence[Proposal], left: dict[str, Untried]) -> bool:
        """Try proposals until one is kept; whether one was.

        What was disturbed is tried once more, after the others. What falls short is tried at once with a companion.
        """
        waiting = [*proposals]
        for index, proposal in enumerate(waiting):
            if reason := self._not_worth(proposal):
                left[proposal.change] = Untried(proposal.change, reason, proposal.bound)
                continue
            if reason := self._spent():
                self.found.ended = reason
                self._leave(waiting[index:], reason, left)
                return False
            disturbed = set(self.disturbed)
            if self._tried(proposal):
                return True
            short = self.goal.objective == "time" and falls_short(self.found.trials[-1])
            if short and (both := self.laboratory.companion(proposal)):
                waiting.insert(index + 1, both)
            if self.disturbed != disturbed:
                waiting.append(proposal)
        return False

    def _leave(self, proposals: Sequence[Proposal], reason: str, left: dict[str, Untried]) -> None:
        """Leave out those that would add something to the stack that is kept."""
        for rest in proposals:
            if any(member not in self.found.stack for member in rest.stack):
                left[rest.change] = Untried(rest.change, self._not_worth(rest) or reason, rest.bound)

    def _spent(self) -> str:
        """Why no trial starts; empty where one may."""
        laboratory, kept = self.laboratory, any(trial.kept for trial in self.found.trials)
        last_s = laboratory.last_s() if kept else 0.0
        return self.budget.spent(laboratory.spent_s(), len(self.found.trials), laboratory.trial_s(), last_s)

    def _not_worth(self, proposal: Proposal) -> str:
        """Why a proposal is not tried; empty where it is."""
        change, bound = proposal.change, proposal.bound
        if change in self.cut:
            return "cut in an earlier round"
        if change in self.tried:
            before = self.tried[change]
            if bound is None or before is None or bound < GREW * before:
                return "rejected in an earlier round, and no more is predicted now"
        return self.goal.hopeless(bound)

    def _goes_on(self, trial: Trial) -> bool:
        """Whether a longer trial follows a quick one: the quick one is in doubt, and time is left.

        What is FASTER already needs the time for its last measurement first.
        """
        last_s = self.laboratory.last_s() * (2 if trial.verdict is Verdict.FASTER else 1)
        return not self.goal.is_clear(trial) and self.laboratory.spent_s() + last_s < self.budget.seconds

    def _tried(self, proposal: Proposal) -> bool:
        """Measure a proposal, and go on from its stack where it is kept."""
        found, goal = self.found, self.goal
        trial = self.laboratory.quick(proposal, found.stack)
        self.tried[proposal.change] = proposal.bound
        judged, longer = goal.judge(trial, found.gained, final=False), None
        if judged.go_on:
            longer = self.laboratory.thorough(proposal, found.stack) if self._goes_on(trial) else None
            if longer is not None:
                found.trials.append(replace(trial, outcome="measured again"))
                trial = longer
            judged = goal.judge(trial, found.gained, final=True)
        text = judged.text + beyond(trial)
        disturbed = trial.verdict is Verdict.INVALID or (longer is None and goal.is_open(trial))
        if disturbed and not judged.go_on and proposal.change not in self.disturbed:
            self.disturbed.add(proposal.change)
            del self.tried[proposal.change]
            text = f"to be tried again: {trial.reason or 'undecided, and it looks faster'}"
        elif not trial.verdict.measured:
            self.cut.add(proposal.change)
        found.trials.append(replace(trial, outcome=text, kept=judged.go_on))
        if judged.go_on:
            found.stack = proposal.stack
            found.gained *= trial.gain.estimate if trial.gain else 1.0
        return judged.go_on


def falls_short(trial: Trial) -> bool:
    """Whether the measured speedup is far below the predicted one: GEMMs in half the time gain nothing while the host
    needs as long as before to launch them."""
    gained = trial.gain.estimate if trial.gain else trial.looked
    if gained is None or trial.predicted is None or not trial.verdict.measured:
        return False
    return trial.predicted >= SHORT * gained


def beyond(trial: Trial) -> str:
    """A remark on a measurement that its prediction rules out; else empty."""
    if trial.gain is None or trial.predicted is None or trial.gain.low <= ABOVE * trial.predicted:
        return ""
    return f"; beyond its bound of {ratio(trial.predicted)}: the bound or the equivalence check is wrong"


def why(bound: float | None, assumption: str, causes: Sequence[str]) -> str:
    """The reason for a trial: a prediction, or bottlenecks that the strategy answers."""
    if bound is not None:
        return f"at most {ratio(bound)}: {assumption}"
    if causes:
        return f"a remedy for {', '.join(cause.replace('_', ' ') for cause in causes)}"
    return "neither a bound nor a diagnosis"
