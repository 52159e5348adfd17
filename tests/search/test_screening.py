"""The screening of a search: which combinations it looks at, and in what order trials follow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from optexp.comparison.screening import MANY, Looked, Stack, screened
from optexp.comparison.search import Proposal, Survey
from optexp.records.trials import Untried
from optexp.strategy import Composed, Evidence, Stage, Strategy, compose, named


@dataclass
class Plain(Strategy):
    stage: ClassVar[Stage] = Stage.REWRITE
    level: int = 0

    def apply(self, program: Any) -> Any:
        return program, {}

    def evidence(self, *args: Any) -> Evidence:
        return Evidence(True, "")


@dataclass
class Captures(Plain):
    """Of which a stack holds one at most."""

    stage: ClassVar[Stage] = Stage.CAPTURE


def strategy(name: str, level: int = 0) -> Strategy:
    return named(Captures(level) if name.startswith("graph") else Plain(level), name)


def survey(*names: str, bounds: Mapping[str, float] | None = None) -> Survey:
    proposals = [Proposal(name, compose([strategy(name)]), (bounds or {}).get(name)) for name in names]
    return Survey(proposals, [Untried("tf32", "left out")])


class Timer:
    """Speedups by stack; 1.0 where none is named."""

    def __init__(self, speedups: Mapping[str, float | Looked]) -> None:
        self.speedups, self.rounds = speedups, list[list[str]]()

    def __call__(self, stacks: Sequence[Stack]) -> list[Looked]:
        self.rounds.append(["+".join(sorted(Composed(stack).labels)) for stack in stacks])
        found = [self.speedups.get(label, 1.0) for label in self.rounds[-1]]
        return [one if isinstance(one, Looked) else Looked(one) for one in found]


def test_what_gains_together_is_proposed_together_first() -> None:
    timer = Timer({"amp": 0.8, "graph": 1.8, "amp+graph": 4.0, "fusion": 1.05, "amp+fusion+graph": 5.2})
    found = screened(survey("amp", "fusion", "graph", "inplace"), [], lambda _: True, timer)
    assert timer.rounds == [
        ["amp", "fusion", "graph", "inplace"],
        ["amp+graph", "fusion+graph", "graph+inplace"],
        ["amp+fusion+graph", "amp+graph+inplace"],
        ["amp+fusion+graph+inplace"],
    ]
    assert [(proposal.change, proposal.looked) for proposal in found.proposals] == [
        ("amp+fusion+graph", 5.2),
        ("amp+graph", 4.0),
        ("graph", 1.8),
        ("fusion", 1.05),
        ("inplace", 1.0),
        ("amp", 0.8),
    ]
    assert found.proposals[0].why == "first looks: graph 1.80×, then amp 2.22×, then fusion 1.30×"
    assert [look.change for look in found.looks][:5] == ["amp", "fusion", "graph", "inplace", "graph+amp"]


def test_the_best_rival_of_the_leader_is_combined_too() -> None:
    timer = Timer({"graph": 1.4, "graphs": 1.2, "graphic": 1.1, "fusion+graph": 1.6, "fusion+graphs": 3.0})
    found = screened(survey("graph", "graphs", "graphic", "fusion", "inplace"), [], lambda _: True, timer)
    assert timer.rounds == [
        ["graph", "graphs", "graphic", "fusion", "inplace"],
        ["fusion+graph", "graph+inplace", "fusion+graphs", "graphs+inplace"],
        ["fusion+graphs+inplace"],
    ]
    assert [proposal.change for proposal in found.proposals][:3] == ["fusion+graphs", "graph", "graphs"]
    assert found.proposals[0].why == "first looks: graphs 1.20×, then fusion 2.50×"


def test_a_rival_that_is_nearly_as_fast_is_combined_further() -> None:
    timer = Timer({
        "graph": 3.0, "graphs": 2.9, "fusion+graph": 3.7, "fusion+graphs": 3.6, "amp+fusion+graph": 3.9,
        "amp+fusion+graphs": 4.3,
    })  # fmt: skip
    found = screened(survey("graph", "graphs", "fusion", "amp"), [], lambda _: True, timer, gain=1.03)
    assert timer.rounds == [
        ["graph", "graphs", "fusion", "amp"],
        ["fusion+graph", "amp+graph", "fusion+graphs", "amp+graphs"],
        ["amp+fusion+graph", "amp+fusion+graphs"],
    ]
    assert [proposal.change for proposal in found.proposals][:2] == ["amp+fusion+graphs", "fusion+graphs"]


def test_a_gain_that_may_be_noise_is_not_combined() -> None:
    timer = Timer({"amp": 1.5, "amp+inplace": 1.6})
    found = screened(survey("inplace", "amp"), [], lambda _: True, timer)
    assert [proposal.change for proposal in found.proposals] == ["amp", "inplace"]


def test_a_small_gain_of_long_steps_is_combined() -> None:
    timer = Timer({"amp": 1.5, "amp+inplace": 1.6, "amp+fusion": 1.53})
    found = screened(survey("inplace", "amp", "fusion"), [], lambda _: True, timer, gain=1.03)
    assert found.proposals[0].change == "amp+inplace"


def test_what_is_refused_is_left_out_with_its_reason_and_what_fails_is_tried_last() -> None:
    speedups = {"streams": Looked(None, "streams: no branches", refused=True), "fusion": Looked(None, "crashed")}
    timer = Timer({**speedups, "amp": 1.5})
    found = screened(survey("streams", "fusion", "amp", "inplace"), [], lambda _: True, timer)
    assert timer.rounds[1:] == [["amp+inplace"]]
    assert [proposal.change for proposal in found.proposals] == ["amp", "inplace", "fusion"]
    assert found.left_out[1:] == [Untried("streams", "UNSUPPORTED: streams: no branches")]


def test_changes_without_a_look_keep_their_places_after_those_that_gain() -> None:
    several = survey("amp", "tf32", "inplace", bounds={"tf32": 1.0})
    found = screened(several, [], lambda proposal: proposal.bound is None, Timer({"inplace": 1.4}))
    assert [proposal.change for proposal in found.proposals] == ["inplace", "amp", "tf32"]


def test_one_look_at_each_strategy_and_none_at_other_options_of_a_kept_one() -> None:
    kept, other = strategy("fusion"), strategy("fusion", 2)
    proposals = [Proposal(other.label, compose([other]))]
    proposals += [Proposal(one.label, compose([kept, one])) for one in (strategy("amp"), strategy("amp", 1))]
    proposals += [Proposal(name, compose([kept, strategy(name)])) for name in map(str, range(MANY))]
    timer = Timer({})
    screened(Survey(proposals), [kept], lambda _: True, timer)
    assert timer.rounds == [["amp+fusion", *(f"{number}+fusion" for number in range(MANY - 1))]]


def test_two_that_do_not_go_together_are_not_combined() -> None:
    timer = Timer({"graph": 2.0, "graphs": 1.9, "amp+graph": 3.0})
    screened(survey("graph", "graphs", "amp"), [], lambda _: True, timer)
    assert timer.rounds == [["graph", "graphs", "amp"], ["amp+graph", "amp+graphs"]]


def test_a_single_change_needs_no_look() -> None:
    timer = Timer({})
    alone = survey("amp")
    assert screened(alone, [], lambda _: True, timer) is alone
    assert timer.rounds == []
