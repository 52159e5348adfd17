"""Which member of a stack gives what, of speedups that are known."""

from __future__ import annotations

from itertools import combinations
from math import log, prod

import pytest

from optexp.comparison.contributions import Values, ablation, interactions, shapley, subsets
from optexp.measurement.contrast import Uncertain

ABC = ["a", "b", "c"]


def values(
    speedups: dict[str, float], members: list[str] | None = None, error: float = 0.001, **reasons: str
) -> Values:
    known = {frozenset(name): Uncertain(log(ratio), error, 4) for name, ratio in speedups.items()}
    return Values(members or ABC, known, {frozenset(name): text for name, text in reasons.items()}, 0.99, 0.01)


def everything(**factors: float) -> dict[str, float]:
    """Members whose gains multiply."""
    names = list(factors)
    chosen = [c for size in range(1, len(names) + 1) for c in combinations(names, size)]
    return {"".join(c): prod(factors[name] for name in c) for c in chosen}


def test_gains_that_multiply_are_the_same_however_they_are_counted() -> None:
    found = ablation(values(everything(a=1.5, b=1.2, c=2.0)))
    for entries in (found.cumulative, found.leave_one_out, found.shapley):
        assert [entry.gain.estimate for entry in entries if entry.gain] == pytest.approx([1.5, 1.2, 2.0])
    assert found.interactions == ["no two members gain more or less together than apart, as far as the intervals show"]
    assert found.cumulative[2].beside == ["a", "b"]
    assert found.leave_one_out[0].beside == ["b", "c"]


def test_shapley_values_multiply_to_the_stack_and_share_an_interaction() -> None:
    gains = everything(a=1.0, b=1.0, c=1.2) | {"ab": 1.44, "abc": 1.44 * 1.2}
    found = ablation(values(gains))
    shares = [entry.gain.estimate for entry in found.shapley if entry.gain]
    assert prod(shares) == pytest.approx(gains["abc"])
    assert shares == pytest.approx([1.2, 1.2, 1.2])


def test_weights_of_the_shapley_value() -> None:
    """Against its definition: the mean over all orders."""
    weights = shapley(ABC, "a")
    assert weights[frozenset("a")] == pytest.approx(1 / 3)
    assert weights[frozenset("abc")] == pytest.approx(1 / 3)
    assert weights[frozenset("ab")] == pytest.approx(1 / 6)
    assert weights[frozenset("bc")] == pytest.approx(-1 / 3)
    assert sum(weights.values()) == pytest.approx(1 / 3)  # the empty stack's, which is left out, is -1/3


def test_interactions_in_words() -> None:
    synergy = interactions(values({"a": 1.0, "b": 1.3, "ab": 1.9}, ["a", "b"]))
    assert synergy == ["a gains nothing without b here (1.00× alone, 1.46× beside b)"]
    rivals = interactions(values({"a": 1.5, "b": 1.5, "ab": 1.5}, ["a", "b"]))
    assert rivals[0] == "a gains nothing more beside b here (1.50× alone, 1.00× beside b)"
    assert len(rivals) == 2
    harm = interactions(values({"a": 1.2, "b": 1.5, "ab": 1.3}, ["a", "b"]))
    assert harm[0] == "a makes it slower beside b here (1.20× alone, 0.87× beside b)"
    more = interactions(values({"a": 1.2, "b": 1.2, "ab": 1.8}, ["a", "b"]))
    assert more == ["a and b gain more together than apart: 1.80× and not 1.44×"]


def test_what_the_intervals_do_not_show_is_no_interaction() -> None:
    found = interactions(values({"a": 1.0, "b": 1.3, "ab": 1.9}, ["a", "b"], error=0.2))
    assert found == ["no two members gain more or less together than apart, as far as the intervals show"]


def test_a_subset_without_a_speedup_is_named_with_its_reason() -> None:
    gains = everything(a=1.5, b=1.2, c=2.0)
    del gains["a"]
    found = ablation(values(gains, a="UNSUPPORTED: a needs b in the stack: add it"))
    first = found.cumulative[0]
    assert first.gain is None
    assert first.reason == "a: UNSUPPORTED: a needs b in the stack: add it"
    assert found.cumulative[2].gain is not None
    assert not found.shapley
    assert found.no_shapley == "not every subset has a speedup: a"


def test_of_five_members_not_all_subsets_are_measured() -> None:
    five = list("abcde")
    chosen = subsets(five)
    assert len(subsets(five[:4])) == 14  # and the whole stack
    assert len(chosen) == 8  # a, ab, abc, abcd, and four others without one member
    found = ablation(values({"".join(sorted(s)): 1.1 for s in [*chosen, frozenset(five)]}, five))
    assert "31 subsets" in found.no_shapley
    assert all(entry.gain for entry in (*found.cumulative, *found.leave_one_out))
