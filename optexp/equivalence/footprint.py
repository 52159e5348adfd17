"""Tensors that each of many training steps changes, and how far: a schedule, a teacher that follows every tenth step.
Consecutive first steps do not show it; the steps that do are judged by all gates.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import islice
from math import isclose

from torch import Tensor

from optexp.equivalence.observation import Observation
from optexp.equivalence.optimizer_rules import LATER
from optexp.equivalence.rule import CALLED, RULE, Rule
from optexp.equivalence.schedules import TOGETHER
from optexp.equivalence.tensor_math import identical, rms

HELD = ("before/param/", "before/buffer/")
LEAST, MOST = 6, 240  # steps
LAST = (240, 120, 60, 24, 12)  # of the last step that is judged: numbers that many periods divide
LIMIT_S = 1.0  # seconds of the baseline's thread on a core; waiting for a core does not count
LONGEST_S = 3.0  # and in all
JUDGED = 3  # first steps that the gates have seen
KINDS = 2  # kinds of steps that the first ones are not
CLOSE = 1e-6  # relative: hyperparameters that are closer are left to the gates
FAR, SUDDENLY = 0.1, 8.0  # relative, and times any step before: changes of another size, and no growth of rounding


@dataclass(frozen=True)
class Footprint:
    """Of one step.

    changed: a hash of the names of parameters, buffers and Python state that it changed
    state:   the same of optimizer state, whose names two optimizers need not share
    numbers: hyperparameters of optimizers after it, by group and key
    sizes:   RMS of what it changed, by parameter and buffer
    called:  hyperparameters that its optimizer was called with; empty where that is not known
    """

    changed: str
    state: str
    numbers: dict[str, float]
    sizes: dict[str, float] = field(default_factory=dict)
    called: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, seen: Observation) -> Footprint:
        """The footprint of an observed step."""
        before = {name: tensor for name, tensor in seen.items() if name.startswith("before/")}
        after = {name: seen.get(_after(name)) for name in before}
        changed = {name for name, t in before.items() if (now := after[name]) is None or not identical(t, now)}
        state = {name for name in changed if name.startswith("before/optimizer/")}
        changed |= {name for name in seen if name.startswith("remembers/")}
        numbers, called = _numbers(seen, RULE), _numbers(seen, CALLED)
        return cls(_hash(changed - state), _hash(state), numbers, _sizes(before, after), called)

    @property
    def kind(self) -> tuple[str, str]:
        """All that it changes."""
        return self.changed, self.state

    def differs(self, other: Footprint) -> bool:
        """Whether another arm's same step changes other things, or leaves other hyperparameters."""
        return self.changed != other.changed or self.computes_otherwise(other)

    def computes_otherwise(self, other: Footprint) -> bool:
        """Whether hyperparameters differ: those of the optimizer's call if both arms record it, else those after it."""
        known = self.called and other.called
        ours, theirs = (self.called, other.called) if known else (self.numbers, other.numbers)
        return not all(isclose(ours[key], theirs[key], rel_tol=CLOSE) for key in ours.keys() & theirs.keys())

    def later_rates(self) -> dict[str, list[float]]:
        """Later learning rates, by name of the schedule."""
        found = dict[str, list[float]]()
        for key, value in self.numbers.items():
            if f"/{LATER}/" in key:
                found.setdefault(key.partition("/")[0], []).append(value)
        return found

    def apart(self, other: Footprint) -> dict[str, float]:
        """How unlike the sizes of both arms' changes are, relative to the larger, by name."""
        both = {name: (self.sizes[name], other.sizes[name]) for name in self.sizes.keys() & other.sizes.keys()}
        return {name: abs(a - b) / max(a, b) for name, (a, b) in both.items() if max(a, b)}


def to_judge(baseline: Sequence[Footprint], candidate: Sequence[Footprint]) -> list[int]:
    """Numbers of steps that the gates have to see: the first ones by which the arms differ, those that are of another
    kind than the first steps of the baseline, and a late one."""
    pairs = [*enumerate(zip(candidate, baseline, strict=True), start=1)]
    chosen = {
        *islice((step for step, (ours, theirs) in pairs if ours.differs(theirs)), 1),
        *islice((step for step, (ours, theirs) in pairs if ours.computes_otherwise(theirs)), 1),
        *islice(_sudden([ours.apart(theirs) for _, (ours, theirs) in pairs]), 1),
        *islice((step for step, found in enumerate(_kinds_apart(baseline, candidate), start=1) if found), 1),
        next((step for step in LAST if step <= len(baseline)), len(baseline)),
    }
    kinds = {each.kind for each in baseline[:JUDGED]}
    for step, each in enumerate(baseline, start=1):
        if each.kind not in kinds and len(kinds) < KINDS + JUDGED:
            kinds.add(each.kind)
            chosen.add(step)
    return sorted(chosen)


def _kinds_apart(baseline: Sequence[Footprint], candidate: Sequence[Footprint]) -> Iterator[bool]:
    """Of each step, whether it is of a kind that one of the arms met earlier than the other: names may differ."""
    met: tuple[dict[str, int], dict[str, int]] = {}, {}
    for step, each in enumerate(zip(baseline, candidate, strict=True)):
        first, other = (seen.setdefault(one.changed, step) for seen, one in zip(met, each, strict=True))
        yield first != other


def one_sided(baseline: Footprint, candidate: Footprint) -> dict[str, list[float]]:
    """Later rates of the schedules of one arm, by name, where the other has none and sets rates by hand."""
    ours, theirs = candidate.later_rates(), baseline.later_rates()
    return {} if bool(ours) is bool(theirs) else ours or theirs


def changing(schedules: Mapping[str, Sequence[float]], steps: int) -> str:
    """The first schedule that changes a rate after so many steps."""
    ahead = {name: rates[2 * (steps // TOGETHER) :] for name, rates in schedules.items()}
    return next(
        (
            name
            for name, rates in ahead.items()
            if any(not isclose(rate, rates[at % 2], rel_tol=CLOSE) for at, rate in enumerate(rates))
        ),
        "",
    )


def _sudden(apart: Sequence[Mapping[str, float]]) -> Iterator[int]:
    """Numbers of steps behind the first ones in which the arms change a tensor far less alike than in any before.

    Arms that drift apart by rounding do so over many steps.
    """
    most = dict[str, float]()
    for step, found in enumerate(apart, start=1):
        if step > JUDGED and any(far > max(FAR, SUDDENLY * most.get(name, 0.0)) for name, far in found.items()):
            yield step
        most |= {name: max(far, most.get(name, 0.0)) for name, far in found.items()}


def _sizes(before: Observation, after: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Of what a step changed, by parameter and buffer."""
    found = dict[str, float]()
    for name, then in before.items():
        now = after[name]
        if now is not None and name.startswith(HELD) and now.shape == then.shape and then.is_floating_point():
            found[name.removeprefix("before/")] = rms(now.to(then) - then)
    return found


def _hash(names: set[str]) -> str:
    return sha256("\n".join(sorted(names)).encode()).hexdigest()


def _after(name: str) -> str:
    kind = name.removeprefix("before/")
    return kind if kind.startswith("buffer/") else f"after/{kind}"


def _numbers(seen: Observation, name: str) -> dict[str, float]:
    rule = Rule.unpacked(seen, name)
    if rule is None:
        return {}
    held = {f"group{index}": group.numbers for index, group in enumerate(rule.groups)}
    held |= {f"{of}/{index}": each for of, beside in rule.beside.items() for index, each in enumerate(beside.groups)}
    found = {f"{owner}/{key}": values for owner, numbers in held.items() for key, values in numbers.items()}
    real = {key: [n.value for n in values if isinstance(n.value, (int, float))] for key, values in found.items()}
    return {f"{key}/{place}": float(v) for key, values in real.items() for place, v in enumerate(values)}
