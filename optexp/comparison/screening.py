"""The screening of mode=auto: first looks at changes and at their combinations. Pure; a function times stacks.

A first look times a few steps and verifies nothing. It takes seconds where a trial takes a minute, and a combination
may gain what no member gains alone: amp is slower until a graph launches its kernels. Looks decide the order of trials,
and propose combinations; every verdict is a trial's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from optexp.comparison.first_look import LEAST
from optexp.comparison.search import Proposal, Survey
from optexp.errors import Unsupported
from optexp.records.trials import Look, Untried
from optexp.strategy import Composed, Strategy, compose
from optexp.support.units import ratio

MANY = 8  # strategies, the most promising by their bounds
CLOSE = 0.85  # least speedup of a rival that is combined further, as a share of the leader's
GAIN = 1.1  # least speedup of the best of several looks at short steps; a smaller one may be noise

Stack = Sequence[Strategy]


@dataclass(frozen=True)
class Looked:
    """speedup: over the stack that was surveyed; None where there is none, for a `reason`
    refused: the stack is UNSUPPORTED
    """

    speedup: float | None
    reason: str = ""
    refused: bool = False


Timed = Callable[[Sequence[Stack]], Sequence[Looked]]


@dataclass(frozen=True)
class Combination:
    """changes: in the order in which they were added"""

    changes: Sequence[str]
    stack: Stack
    looked: Looked

    @property
    def speedup(self) -> float:
        return self.looked.speedup or 0.0


def screened(
    survey: Survey, surveyed: Stack, worth: Callable[[Proposal], bool], timed: Timed, gain: float = GAIN
) -> Survey:
    """The survey with its proposals in the order of first looks, the best combination before all.

    Args:
        surveyed: The stack that was profiled.
        worth: Whether a proposal may be tried at all.
        timed: Looks at stacks, each beside the surveyed one.
        gain: Least speedup by which one more change is added to a combination.
    """
    members = _members(filter(worth, survey.proposals), surveyed)
    if len(members) < 2:
        return survey
    best, looks = Combination([], surveyed, Looked(1.0)), list[Combination]()
    front = [best]
    while together := [c for found in front for change, m in members.items() if (c := _with(found, change, m))]:
        tried = _looked(together, timed)
        looks += tried
        leader = max(tried, key=lambda found: found.speedup)
        if leader.speedup < gain * best.speedup:
            break
        beside = [found for found in tried if found.changes[:-1] == leader.changes[:-1]]
        failed = {found.changes[-1] for found in beside if found.looked.speedup is None}
        least = 0.0 if best.stack is surveyed else CLOSE * leader.speedup
        front = [leader, *(rival for rival in _rivals(leader, tried, members) if rival.speedup >= least)]
        members = {change: member for change, member in members.items() if change not in failed}
        best = leader
    known = {tuple(found.changes): found for found in looks}
    return _ordered(survey, [known[(*best.changes[:length],)] for length in range(1, len(best.changes) + 1)], looks)


def _rivals(
    leader: Combination, tried: Sequence[Combination], members: Mapping[str, Strategy]
) -> Sequence[Combination]:
    """The best of those that exclude the leader: in a combination it may gain more, as amp does than tf32."""

    def excluded(found: Combination) -> bool:
        return any(_with(leader, change, members[change]) is None for change in {*found.changes} - {*leader.changes})

    others = (found for found in tried if found is not leader and found.looked.speedup)
    return sorted(filter(excluded, others), key=lambda found: -found.speedup)[:1]


def _members(proposals: Iterable[Proposal], surveyed: Stack) -> dict[str, Strategy]:
    """The first proposal of each strategy outside the stack, by its change. Other options may take minutes to compile;
    trials try them."""
    members, names = dict[str, Strategy](), {member.name for member in surveyed}
    for proposal in proposals:
        member = _member(proposal)
        if member.name not in names and len(members) < MANY:
            names.add(member.name)
            members[proposal.change] = member
    return members


def _member(proposal: Proposal) -> Strategy:
    """The strategy that a proposal adds."""
    return next(member for member in proposal.stack if member.label == proposal.change)


def _with(found: Combination, change: str, member: Strategy) -> Combination | None:
    """A combination and one change more; None where they do not go together."""
    if change in found.changes:
        return None
    try:
        return Combination([*found.changes, change], compose([*found.stack, member]), Looked(None))
    except Unsupported:
        return None


def _looked(combinations: Sequence[Combination], timed: Timed) -> list[Combination]:
    looks = timed([found.stack for found in combinations])
    return [replace(found, looked=looked) for found, looked in zip(combinations, looks, strict=True)]


def _ordered(survey: Survey, chain: Sequence[Combination], looks: Sequence[Combination]) -> Survey:
    """Combinations, the longest first; then single changes: faster ones, undecided ones, slower ones."""
    alone = {found.changes[0]: found.looked for found in looks if len(found.changes) == 1}

    def place(proposal: Proposal) -> tuple[int, float]:
        looked = alone.get(proposal.change)
        if looked is None:
            return (1, 0.0)
        speedup = looked.speedup or 0.0
        return (0, -speedup) if speedup >= GAIN else (1, 0.0) if speedup >= LEAST else (2, 0.0)

    refused = {change: looked.reason for change, looked in alone.items() if looked.refused}
    singles = [replace(p, looked=_speedup(alone.get(p.change))) for p in survey.proposals if p.change not in refused]
    singles.sort(key=place)
    together = [_proposal(chain[:length]) for length in range(len(chain), 1, -1)]
    return replace(
        survey,
        proposals=[*together, *singles],
        left_out=[*survey.left_out, *(Untried(change, f"UNSUPPORTED: {why}") for change, why in refused.items())],
        looks=[Look("+".join(found.changes), found.looked.speedup, found.looked.reason) for found in looks],
    )


def _speedup(looked: Looked | None) -> float | None:
    return looked.speedup if looked else None


def _proposal(chain: Sequence[Combination]) -> Proposal:
    """All changes of a chain at once."""
    last, before, steps = chain[-1], 1.0, list[str]()
    for found in chain:
        steps.append(f"{found.changes[-1]} {ratio(found.speedup / before)}")
        before = found.speedup
    change = "+".join(Composed([member for member in last.stack if member.label in last.changes]).labels)
    return Proposal(change, last.stack, why=f"first looks: {', then '.join(steps)}", looked=last.speedup)
