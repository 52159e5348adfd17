"""Changes of a stack that a search may try: strategies with their options, and the order in which they are tried."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from optexp.comparison.suggestions import typed
from optexp.errors import Unsupported
from optexp.records.profile import Bottleneck
from optexp.records.trials import Untried
from optexp.strategy import Remedy, Strategy, compose, named

GREW = 1.5  # times its share before: then a bottleneck is what a change has left


@dataclass(frozen=True)
class Candidate:
    """One strategy with some of its options, in a stack.

    options: fields that differ from the strategy's defaults
    stack:   with it, composed
    swaps:   the stack had this strategy with other options
    """

    strategy: Strategy
    options: Mapping[str, Any]
    stack: Sequence[Strategy]
    swaps: bool

    @property
    def change(self) -> str:
        return self.strategy.label

    @property
    def typed(self) -> str:
        """As on the command line."""
        return typed(self.strategy, Remedy("", options=self.options))

    def answers(self, bottlenecks: Sequence[Bottleneck]) -> list[tuple[int, int, str]]:
        """Place of each bottleneck that this strategy remedies, rank of the remedy, and the cause."""
        return sorted(
            (place, remedy.rank, cause)
            for place, bottleneck in enumerate(bottlenecks)
            for cause in bottleneck.causes
            for remedy in self.strategy.remedies
            if remedy.against == cause and dict(remedy.options) == dict(self.options)
        )


def candidates(stack: Sequence[Strategy], strategies: Sequence[Strategy]) -> tuple[list[Candidate], list[Untried]]:
    """All that a stack can become by one change, and what it cannot, with the reason."""
    found, refused = list[Candidate](), list[Untried]()
    labels = {strategy.label for strategy in stack}
    for strategy in strategies:
        others = [member for member in stack if member.name != strategy.name]
        for options in options_of(strategy):
            candidate = named(replace(strategy, **options), strategy.name)
            if candidate.label in labels:
                continue
            try:
                composed = compose([*others, candidate])
            except Unsupported as reason:
                refused.append(Untried(candidate.label, f"cannot be composed: {reason}"))
            else:
                found.append(Candidate(candidate, options, composed, len(others) < len(stack)))
    return found, refused


def options_of(strategy: Strategy) -> Iterator[Mapping[str, Any]]:
    """None, those of its remedies, and those that it declares for a search; each once."""
    seen = list[dict[str, Any]]()
    for options in ({}, *(remedy.options for remedy in strategy.remedies), *strategy.variants):
        if dict(options) not in seen:
            seen.append(dict(options))
            yield options


def order(candidate: Candidate, bound: float | None, bottlenecks: Sequence[Bottleneck]) -> tuple[float, ...]:
    """The lowest is tried first.

    Strategies with a bound, the largest first, and then their other options; those without one by the diagnosis; then
    those that no diagnosis names, as they are; other options of members; other options of the rest.

    Args:
        bound: Largest predicted speedup; None without one.
    """
    if bound is not None:
        return (0 if not candidate.options else 1, -bound)
    if answers := candidate.answers(bottlenecks):
        place, rank, _ = answers[0]
        return (2, float(place), float(rank))
    return (4,) if candidate.swaps else (5,) if candidate.options else (3,)


def grown(before: Mapping[str, float], now: Sequence[Bottleneck]) -> list[Bottleneck]:
    """Bottlenecks that take a larger share of a step than they did.

    Args:
        before: Shares by label.
    """
    return [bottleneck for bottleneck in now if bottleneck.share >= GREW * before.get(bottleneck.label, 0.0)]


def remedy(
    stack: Sequence[Strategy], strategies: Sequence[Strategy], bottlenecks: Sequence[Bottleneck]
) -> Candidate | None:
    """The first strategy, in the order of a search, that answers a bottleneck of a stack; None where none does."""
    possible, _ = candidates(stack, strategies)
    fitting = [candidate for candidate in possible if not candidate.swaps and candidate.answers(bottlenecks)]
    return min(fitting, key=lambda candidate: order(candidate, None, bottlenecks), default=None)
