"""Which member of a stack gives what: arithmetic on the log-speedups of its subsets. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import factorial

from optexp.measurement import statistics
from optexp.measurement.contrast import EQUAL, Uncertain, combined
from optexp.records.trials import Ablation, Contribution, Gain
from optexp.result import Verdict
from optexp.support.units import ratio

MOST = 4  # members of a stack whose subsets are all measured

Subset = frozenset[str]


@dataclass(frozen=True)
class Values:
    """Log-speedups of the subsets of a stack.

    members:    labels, in the order in which they are applied
    speedups:   log-speedup of each subset that was measured; the empty one's is 0
    reasons:    why others were not
    confidence: of intervals;  min_effect: smaller differences are none
    """

    members: Sequence[str]
    speedups: Mapping[Subset, Uncertain]
    reasons: Mapping[Subset, str]
    confidence: float
    min_effect: float

    def of(self, subset: Subset) -> Uncertain | None:
        return self.speedups.get(subset) if subset else EQUAL

    def difference(self, more: Subset, less: Subset) -> Uncertain | None:
        """Log-speedup of `more` over `less`."""
        above, below = self.of(more), self.of(less)
        return None if above is None or below is None else combined([(1, above), (-1, below)])

    def gain(self, value: Uncertain) -> Gain:
        """As a ratio."""
        estimate, low, high = value.interval(self.confidence).ratios()
        return Gain(estimate, low, high if high < float("inf") else None)

    def verdict(self, value: Uncertain) -> Verdict:
        return statistics.decide(value.interval(self.confidence), self.min_effect)

    def why_not(self, *subsets: Subset) -> str:
        """Why a difference is not known."""
        return "; ".join(
            f"{self.name(s)}: {self.reasons.get(s, 'not measured')}" for s in subsets if self.of(s) is None
        )

    def name(self, subset: Subset) -> str:
        return "+".join(self.ordered(subset)) or "baseline"

    def ordered(self, subset: Subset) -> list[str]:
        return [member for member in self.members if member in subset]


def subsets(members: Sequence[str]) -> list[Subset]:
    """Subsets to measure beside the whole stack: all of a small stack, else those of the first two counts."""
    count = len(members)
    if count <= MOST:
        return [frozenset(chosen) for size in range(1, count) for chosen in combinations(members, size)]
    growing = [frozenset(members[:size]) for size in range(1, count)]
    without = [frozenset(members) - {member} for member in members]
    return list(dict.fromkeys([*growing, *without]))


def ablation(values: Values) -> Ablation:
    """All three counts, and interactions."""
    members = values.members
    whole = frozenset(members)
    cumulative = [_added(values, member, frozenset(members[:index])) for index, member in enumerate(members)]
    left_out = [_added(values, member, whole - {member}) for member in members]
    missing = [s for s in [*subsets(members), whole] if values.of(s) is None]
    no_shapley = ""
    if len(members) > MOST:
        every = 2 ** len(members) - 1
        no_shapley = f"a stack of {len(members)} has {every} subsets: all are measured of up to {MOST} members"
    elif missing:
        no_shapley = f"not every subset has a speedup: {', '.join(map(values.name, missing))}"
    shares = [] if no_shapley else [_shared(values, member) for member in members]
    return Ablation(list(members), cumulative, left_out, shares, no_shapley, interactions(values))


def _added(values: Values, member: str, beside: Subset) -> Contribution:
    more = beside | {member}
    found = values.difference(more, beside)
    reason = "" if found else values.why_not(more, beside)
    return Contribution(member, values.ordered(beside), values.gain(found) if found else None, reason)


def _shared(values: Values, member: str) -> Contribution:
    found = combined((weight, values.speedups[subset]) for subset, weight in shapley(values.members, member).items())
    return Contribution(member, [m for m in values.members if m != member], values.gain(found))


def shapley(members: Sequence[str], member: str) -> dict[Subset, float]:
    """By subset, the weight of its value in a member's Shapley value: the mean gain over all orders of adding them."""
    count, others = len(members), [m for m in members if m != member]
    weights: dict[Subset, float] = {}
    for size in range(count):
        weight = factorial(size) * factorial(count - size - 1) / factorial(count)
        for chosen in combinations(others, size):
            before = frozenset(chosen)
            weights[before | {member}] = weight
            if before:
                weights[before] = -weight
    return weights


# --- interactions ------------------------------------------------------------------------------------------------


def interactions(values: Values) -> list[str]:
    """Sentences on pairs of members whose joint gain is not the product of their own; one sentence without any."""
    found, known = list[str](), 0
    for one, other in combinations(values.members, 2):
        alone = values.of(frozenset({one})), values.of(frozenset({other}))
        together = values.of(frozenset({one, other}))
        if alone[0] is None or alone[1] is None or together is None:
            continue
        known += 1
        found += list(_words(values, (one, other), (alone[0], alone[1]), together))
    if not known:
        return []
    return found or ["no two members gain more or less together than apart, as far as the intervals show"]


def _words(
    values: Values, names: tuple[str, str], alone: tuple[Uncertain, Uncertain], together: Uncertain
) -> Iterator[str]:
    extra = combined([(1, together), (-1, alone[0]), (-1, alone[1])])
    kind = values.verdict(extra)
    if kind not in (Verdict.FASTER, Verdict.SLOWER):
        return
    said = False
    for name, other, own, others in ((*names, *alone), (names[1], names[0], alone[1], alone[0])):
        beside = combined([(1, together), (-1, others)])
        gains, gains_beside = values.verdict(own), values.verdict(beside)
        by_itself, with_it = (ratio(values.gain(value).estimate) for value in (own, beside))
        if gains is not Verdict.FASTER and gains_beside is Verdict.FASTER:
            yield f"{name} gains nothing without {other} here ({by_itself} alone, {with_it} beside {other})"
        elif gains is Verdict.FASTER and gains_beside is Verdict.SLOWER:
            yield f"{name} makes it slower beside {other} here ({by_itself} alone, {with_it} beside {other})"
        elif gains is Verdict.FASTER and gains_beside is not Verdict.FASTER:
            yield f"{name} gains nothing more beside {other} here ({by_itself} alone, {with_it} beside {other})"
        else:
            continue
        said = True
    if not said:
        more = "more" if kind is Verdict.FASTER else "less"
        both, product = values.gain(together), values.gain(combined([(1, alone[0]), (1, alone[1])]))
        figures = f"{ratio(both.estimate)} and not {ratio(product.estimate)}"
        yield f"{names[0]} and {names[1]} gain {more} together than apart: {figures}"
