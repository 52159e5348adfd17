"""The loop of mode=auto over a laboratory that measures nothing: what is tried, kept, cut and left out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import SimpleNamespace
from typing import Any

from optexp.comparison.goal import Budget, Goal
from optexp.comparison.laboratory import brief
from optexp.comparison.search import Proposal, Searched, Survey, search
from optexp.records.trials import Figures, Gain, Trial, Untried
from optexp.result import Verdict

EVER = Budget(1e9)


@dataclass
class Fake:
    """gains: true speedups by change;  bounds: by change;  verdicts: of those that end otherwise"""

    gains: Mapping[str, float]
    bounds: Mapping[str, float] = field(default_factory=dict)
    verdicts: Mapping[str, Verdict] = field(default_factory=dict)
    memory: Mapping[str, float] = field(default_factory=dict)
    companions: Mapping[str, str] = field(default_factory=dict)
    looked: Mapping[str, float] = field(default_factory=dict)
    brief: bool = False
    each_s: float = 1.0
    takes_s: float = 0.0
    asked: list[tuple[str, str]] = field(default_factory=list)

    def survey(self, stack: Sequence[Any]) -> Survey:
        names = {member.name for member in stack}
        left = [name for name in self.gains if name not in names and "+" not in name]
        left.sort(key=lambda name: -self.bounds.get(name, 0.0))
        proposals = [Proposal(n, [*stack, SimpleNamespace(name=n)], self.bounds.get(n)) for n in left]
        return Survey(proposals, [Untried("tf32", "UNSUPPORTED: no GPU")])

    def quick(self, proposal: Proposal, against: Sequence[Any]) -> Trial:
        return self.measured("quick", proposal, against, 0.05)

    def thorough(self, proposal: Proposal, against: Sequence[Any]) -> Trial | None:
        return None if self.brief else self.measured("default", proposal, against, 0.001)

    def measured(self, preset: str, proposal: Proposal, against: Sequence[Any], width: float) -> Trial:
        self.asked.append((preset, proposal.change))
        gain, before = self.gains[proposal.change], [member.name for member in against]
        verdict = self.verdicts.get(proposal.change)
        if verdict is None:
            verdict = Verdict.FASTER if gain - width > 1.01 else Verdict.INCONCLUSIVE
        looked = self.looked.get(proposal.change)
        shown = Gain(gain, gain - width, gain + width) if verdict.measured and looked is None else None
        peak = prod(self.memory.get(name, 1.0) for name in before) * 100
        return Trial(
            len(self.asked),
            [member.name for member in proposal.stack],
            before,
            verdict,
            "" if shown else "the reason",
            shown,
            candidate=Figures(100 / gain, peak * self.memory.get(proposal.change, 1.0)),
            baseline=Figures(100, peak),
            change=proposal.change,
            predicted=proposal.bound,
            looked=looked,
        )

    def companion(self, proposal: Proposal) -> Proposal | None:
        other = self.companions.get(proposal.change)
        return Proposal(f"{proposal.change}+{other}", [*proposal.stack, SimpleNamespace(name=other)]) if other else None

    def spent_s(self) -> float:
        return self.each_s * len(self.asked)

    def trial_s(self) -> float:
        return self.takes_s if self.asked else 0.0

    def last_s(self) -> float:
        return self.takes_s if self.asked else 0.0


def found(fake: Fake, goal: Goal | None = None, budget: Budget = EVER) -> Searched:
    return search(fake, goal or Goal(), budget, [])


def names(result: Searched) -> list[str]:
    return [member.name for member in result.stack]


def test_the_best_predicted_is_tried_first_and_what_is_faster_is_kept() -> None:
    fake = Fake({"amp": 1.4, "fusion": 1.2}, {"amp": 1.5, "fusion": 2.0})
    result = found(fake)
    assert names(result) == ["fusion", "amp"]
    assert [t.change for t in result.trials if t.kept] == ["fusion", "amp"]
    assert result.gained == 1.4 * 1.2
    assert "2 %" in result.ended


def test_a_hopeless_trial_is_measured_only_briefly() -> None:
    fake = Fake({"inplace": 0.9})
    result = found(fake)
    assert fake.asked == [("quick", "inplace")]
    assert result.trials[0].outcome == "rejected: at most 0.95×"
    assert not names(result)


def test_a_promising_trial_that_does_not_hold_is_rejected() -> None:
    fake = Fake({"inplace": 1.0})
    result = found(fake)
    assert fake.asked == [("quick", "inplace"), ("default", "inplace")]
    assert result.trials[-1].outcome.startswith("rejected: INCONCLUSIVE")


def test_one_measurement_decides_where_the_job_asks_for_no_more() -> None:
    fake = Fake({"amp": 1.5}, brief=True)
    result = found(fake)
    assert fake.asked == [("quick", "amp")]
    assert names(result) == ["amp"]
    assert result.trials[0].outcome == "kept"


def test_little_predicted_gain_is_not_tried_and_said_so() -> None:
    fake = Fake({"amp": 1.5, "streams": 1.5}, {"amp": 1.8, "streams": 1.01})
    result = found(fake)
    assert ("quick", "streams") not in fake.asked
    reasons = {entry.change: entry.reason for entry in result.untried}
    assert reasons["streams"] == "predicted: at most 1.01×, less than 1.02×"
    assert reasons["tf32"] == "UNSUPPORTED: no GPU"


def test_what_has_no_bound_is_tried_after_what_has_one() -> None:
    fake = Fake({"unknown": 1.5, "amp": 1.5}, {"amp": 1.1})
    found(fake)
    assert fake.asked == [("quick", "amp"), ("quick", "unknown")]


def test_a_clear_gain_is_kept_at_once_and_a_doubtful_one_is_measured_again() -> None:
    fake = Fake({"clear": 1.5, "doubtful": 1.04}, verdicts={})
    result = found(fake)
    assert fake.asked[:3] == [("quick", "clear"), ("quick", "doubtful"), ("default", "doubtful")]
    assert names(result) == ["clear", "doubtful"]
    assert result.trials[0].outcome == "kept"


def test_what_was_disturbed_is_tried_once_more_after_the_others() -> None:
    fake = Fake({"graph": 1.5, "amp": 0.5}, {"graph": 2.0, "amp": 1.5}, {"graph": Verdict.INVALID})
    result = found(fake)
    assert [change for _, change in fake.asked] == ["graph", "amp", "graph"]
    assert [trial.outcome for trial in result.trials if trial.change == "graph"] == [
        "to be tried again: the reason",
        "cut: the reason",
    ]

    undecided = Fake({"graph": 1.3}, verdicts={"graph": Verdict.INCONCLUSIVE}, brief=True)
    assert [t.outcome for t in found(undecided).trials] == [
        "to be tried again: undecided, and it looks faster",
        "rejected: INCONCLUSIVE, not shown to be faster",
    ]
    small = Fake({"graph": 1.01}, verdicts={"graph": Verdict.INCONCLUSIVE}, brief=True)
    assert len(found(small).trials) == 1

    class Calms(Fake):
        def quick(self, proposal: Proposal, against: Sequence[Any]) -> Trial:
            trial = super().quick(proposal, against)
            self.verdicts = {}
            return trial

    assert names(found(Calms(fake.gains, fake.bounds, fake.verdicts))) == ["graph"]


def test_a_wrong_result_cuts_the_branch_for_good() -> None:
    fake = Fake({"cheat": 9.0, "amp": 1.5}, {"cheat": 9.0}, {"cheat": Verdict.NOT_EQUIVALENT})
    result = found(fake)
    assert fake.asked.count(("quick", "cheat")) == 1
    assert names(result) == ["amp"]
    assert result.trials[0].outcome == "cut: the reason"


def test_what_was_rejected_is_tried_again_only_where_more_is_predicted() -> None:
    bounds = {"amp": 1.5, "graph": 1.2}
    fake = Fake({"graph": 0.99, "fusion": 1.5, "amp": 0.9}, bounds)

    class Grows(Fake):
        def survey(self, stack: Sequence[Any]) -> Survey:
            self.bounds = {**bounds, "graph": 3.0} if stack else bounds
            return super().survey(stack)

    fake = Grows(fake.gains, bounds)
    found(fake)
    assert fake.asked.count(("quick", "graph")) == 2
    assert fake.asked.count(("quick", "amp")) == 1


def test_the_budget_ends_the_search_and_names_what_is_left() -> None:
    gains = {"a": 0.5, "b": 0.5, "c": 0.5}
    by_time = found(Fake(gains, each_s=10), budget=Budget(20))
    assert [t.change for t in by_time.trials] == ["a", "b"]
    assert by_time.ended == "the budget of 20 s was spent"
    assert ("c", by_time.ended) in [(entry.change, entry.reason) for entry in by_time.untried]
    by_count = found(Fake(gains), budget=Budget(1e9, 1))
    assert [t.change for t in by_count.trials] == ["a"]
    assert by_count.ended == "the budget of 1 trial was spent"


def test_less_memory_is_kept_although_no_faster_but_not_at_any_price() -> None:
    goal = Goal("memory", max_slowdown=1.1)
    fake = Fake({"inplace": 1.0, "none": 0.5, "pool": 0.99}, memory={"inplace": 0.8, "none": 0.5, "pool": 0.999})
    result = found(fake, goal)
    assert names(result) == ["inplace"]
    outcomes = {t.change: t.outcome for t in result.trials}
    assert "2.00× the baseline's time" in outcomes["none"]
    assert outcomes["pool"] == "rejected: peak memory 1.00×"


def test_a_stack_that_cannot_be_profiled_again_ends_the_search() -> None:
    class Breaks(Fake):
        def survey(self, stack: Sequence[Any]) -> Survey:
            return Survey([], ended="no profile") if stack else super().survey(stack)

    result = found(Breaks({"amp": 1.5, "fusion": 1.5}))
    assert names(result) == ["amp"]
    assert result.ended == "no profile"


def test_more_than_was_predicted_is_flagged() -> None:
    fake = Fake({"amp": 1.5}, {"amp": 1.2})
    outcome = found(fake).trials[-1].outcome
    assert outcome == "kept; beyond its bound of 1.20×: the bound or the equivalence check is wrong"


def test_a_first_look_is_less_than_the_measurement_or_is_left_out(experiment) -> None:
    rigorous = experiment("measurement=rigorous").measurement
    short = brief(rigorous)
    assert short is not None
    assert (short.processes_max, short.thorough) == (1, True), "what is kept at once is verified as the job asks"
    assert brief(experiment("measurement=quick").measurement) is None


def test_slowdowns_of_several_steps_add_up() -> None:
    fake = Fake({"a": 0.95, "b": 0.94}, memory={"a": 0.8, "b": 0.8})
    assert names(found(fake, Goal("memory", max_slowdown=1.1))) == ["a"]


def test_a_memory_limit_rejects_what_is_faster() -> None:
    fake = Fake({"graph": 2.0}, memory={"graph": 2.0})
    result = found(fake, Goal(memory_limit_mib=150))
    assert not names(result)
    assert result.trials[-1].outcome == "rejected: its peak memory of 200 MiB is over 150 MiB"
    assert names(found(fake, Goal(memory_limit_mib=250))) == ["graph"]


def test_a_baseline_over_the_limit_may_come_nearer() -> None:
    fake = Fake({"inplace": 1.0, "checkpoint": 1.0}, memory={"inplace": 0.9, "checkpoint": 0.5})
    result = found(fake, Goal(memory_limit_mib=60))
    assert names(result) == ["inplace", "checkpoint"]


def test_the_budget_holds_the_last_measurement() -> None:
    gains = {"amp": 1.5, "fusion": 1.5, "inplace": 1.5, "pool": 1.5}
    result = found(Fake(gains, brief=True, each_s=10, takes_s=10), budget=Budget(35))
    assert names(result) == ["amp", "fusion"], "the third trial would leave 5 s"
    assert found(Fake(gains, brief=True, each_s=10, takes_s=10), budget=Budget(30)).ended == (
        "the rest of the budget of 30 s holds no trial beside the last measurement"
    )


def test_a_kept_stack_is_not_profiled_again_without_time_for_a_trial() -> None:
    class Counts(Fake):
        def survey(self, stack: Sequence[Any]) -> Survey:
            self.surveys = getattr(self, "surveys", 0) + 1
            return super().survey(stack)

    fake = Counts({"amp": 1.5, "fusion": 1.2}, brief=True, each_s=10, takes_s=10)
    result = found(fake, budget=Budget(25))
    assert names(result) == ["amp"]
    assert fake.surveys == 1
    assert {entry.change: entry.reason for entry in result.untried}["fusion"] == result.ended
    assert "amp" not in {entry.change for entry in result.untried}


def test_a_change_that_falls_short_is_tried_with_a_remedy_for_what_limits_it() -> None:
    fake = Fake({"amp": 1.0, "cuda_graph": 1.05, "amp+cuda_graph": 4.0}, {"amp": 6.0, "cuda_graph": 1.1})
    fake.companions = {"amp": "cuda_graph"}
    result = found(fake)
    assert names(result) == ["amp", "cuda_graph"]
    assert [t.change for t in result.trials if t.kept] == ["amp+cuda_graph"]


def test_what_a_first_look_shows_to_be_slower_is_rejected_and_tried_with_a_remedy() -> None:
    fake = Fake({"amp": 0.8, "cuda_graph": 1.05, "amp+cuda_graph": 4.0}, {"amp": 6.0, "cuda_graph": 1.1})
    fake.companions, fake.looked = {"amp": "cuda_graph"}, {"amp": 0.8}
    result = found(fake)
    assert fake.asked[:2] == [("quick", "amp"), ("quick", "amp+cuda_graph")], "none is measured for longer"
    assert result.trials[0].outcome == "rejected: the reason"
    assert names(result) == ["amp", "cuda_graph"]


def test_a_change_that_gains_what_was_predicted_has_no_companion() -> None:
    fake = Fake({"amp": 1.0, "amp+cuda_graph": 4.0}, {"amp": 1.15})
    fake.companions = {"amp": "cuda_graph"}
    assert not names(found(fake))


def test_a_search_for_less_memory_tries_no_companion_for_time() -> None:
    fake = Fake({"amp": 1.0, "amp+cuda_graph": 4.0}, {"amp": 6.0}, companions={"amp": "cuda_graph"})
    found(fake, Goal(objective="memory"))
    assert [change for _, change in fake.asked] == ["amp"]


def test_no_longer_trial_begins_without_time_for_it_and_for_the_last_measurement() -> None:
    doubtful = {"amp": 1.08}  # FASTER, and not by the least gain
    assert [preset for preset, _ in _asked(doubtful, Budget(25))] == ["quick"], "10 s, and twice 10 s more"
    assert [preset for preset, _ in _asked(doubtful, Budget(31))] == ["quick", "default"]
    assert [preset for preset, _ in _asked({"amp": 1.04}, Budget(25))] == ["quick", "default"], "it may keep nothing"


def _asked(gains: Mapping[str, float], budget: Budget) -> list[tuple[str, str]]:
    fake = Fake(gains, each_s=10, takes_s=10)
    found(fake, Goal(min_gain=0.05), budget)
    return fake.asked
