"""Steps that are judged beside the first ones: those of another kind, those by which two arms differ, the last."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from optexp.equivalence.footprint import Footprint, to_judge
from optexp.equivalence.rule import RULE, Beside, Group, Number, Rule


def walk(names: str, rates: Sequence[float] = (), state: str = "") -> list[Footprint]:
    """A step for each letter, which says what it changes; likewise of its optimizer's state."""
    every = zip(names, state or names, rates or [0.1] * len(names), strict=True)
    return [Footprint(name, held, {"group0/lr/0": rate}) for name, held, rate in every]


def test_alike_steps_need_a_look_at_the_last_alone() -> None:
    assert to_judge(walk("aaaaaaaa"), walk("aaaaaaaa")) == [8]


def test_a_step_of_another_kind_is_judged_once() -> None:
    assert to_judge(walk("aaaabaaba"), walk("aaaabaaba")) == [5, 9]
    assert to_judge(walk("aababaab"), walk("aababaab")) == [8], "the first steps show it"


def test_a_late_step_is_one_that_many_periods_divide() -> None:
    assert to_judge(walk("a" * 240), walk("a" * 240)) == [240]
    assert to_judge(walk("a" * 100), walk("a" * 100)) == [60]


def test_optimizers_need_not_share_the_names_of_their_state() -> None:
    slow = walk("aaaaaaaaa", state="aaaabaaab")
    assert to_judge(slow, walk("aaaaaaaaa", state="zzzzzzzzz")) == [5, 9]


def test_the_first_step_by_which_the_arms_differ_is_judged() -> None:
    assert to_judge(walk("aaaabaaba"), walk("aaaaabaab")) == [5, 9]
    assert to_judge(walk("aaaaa", [1, 1, 1, 0.5, 0.5]), walk("aaaaa", [1, 1, 1, 1, 0.5])) == [4, 5]
    assert to_judge(walk("aaaaa", [1, 1, 1, 0.5, 0.5]), walk("aaaaa", [1, 1, 1, 0.5 + 1e-9, 0.5])) == [5]


def test_a_change_of_another_size_is_judged() -> None:
    theirs = [Footprint("a", "a", {}, {"param/w": 1.0, "param/b": 0.0}) for _ in range(9)]
    grown = [Footprint("a", "a", {}, {"param/w": 1.0 + 0.001 * 1.7**step, "param/b": 0.0}) for step in range(9)]
    assert to_judge(theirs, grown) == [9]
    sudden = [*grown[:5], Footprint("a", "a", {}, {"param/w": 1.3, "param/b": 0.0}), *grown[6:]]
    assert to_judge(theirs, sudden) == [6, 9]
    rounding = [Footprint("a", "a", {}, {"param/w": 1.0, "param/b": 1e-9 * step}) for step in range(9)]
    assert to_judge(theirs, rounding) == [9]


def test_what_a_step_changes() -> None:
    beside = {"schedule": Beside("StepLR", [{"gamma": [Number(0.5)]}])}
    rule = Rule("SGD", ["lr"], [Group(["w"], {"lr": [Number(0.1)]})], beside, [], [])
    seen = {
        "before/param/w": torch.zeros(2),
        "after/param/w": torch.ones(2),
        "before/buffer/b": torch.zeros(2),
        "buffer/b": torch.zeros(2),
        RULE: rule.packed(),
    }
    found = Footprint.of(seen)
    moved = {"before/optimizer/w/slow": torch.zeros(2), "after/optimizer/w/slow": torch.ones(2)}
    assert Footprint.of({**seen, **moved}).kind != found.kind
    assert not found.differs(Footprint.of({**seen, **moved}))
    assert found.numbers == {"group0/lr/0": 0.1, "schedule/0/gamma/0": 0.5}
    assert found.differs(Footprint.of({**seen, "buffer/b": torch.ones(2)}))
    assert found.differs(Footprint.of({**seen, "remembers/teacher": torch.ones(2)}))
    twice = Footprint.of({**seen, "after/param/w": torch.full((2,), 2.0)})
    assert not found.differs(twice)
    assert found.apart(twice) == {"param/w": 0.5}
