"""Names of the same Python state of steps in two programs that were written apart, matched by how it changes.

A second file may give an average another name, hold it in another object, and keep more than the baseline does. Later
steps and readers of the baseline's state depend on its values: each must be somewhere in the other program, and change
there alike. What the other program keeps beside them shows in later results, or in none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

import torch

from optexp.equivalence.attributes import NAMED
from optexp.equivalence.observation import Observation, unpacked
from optexp.equivalence.optimizer_counterparts import is_count
from optexp.equivalence.optimizer_rules import all_hyperparameters, shown
from optexp.equivalence.schedules import schedules
from optexp.program import StepState
from optexp.records.verification import Finding, broken

BY_NAME = ("optimizer/", "random", "numpy.random")  # state that both programs keep by the same name
LACKS = "the baseline changes it; nothing that the second program keeps changes as it does"
FOR_PEOPLE = (
    "the baseline keeps {}, which nothing in its files reads but its own update and what prints it: the second program"
    " keeps nothing like it, and need not"
)
REARRANGED = (
    "{}: the second program keeps the rows that a step writes there in another container; their order and their number"
    " were not compared, and show in later results alone"
)
ALONE = "it changes as something of the baseline's does, and at times alone"
COUNTS = (
    "the baseline counts it on, and nothing that the second program keeps counts alike: what later steps make of it was"
    " not seen; keep it in both, or in neither"
)


@dataclass
class StepCounterparts:
    """Names of the same state that steps keep in Python.

    names: by a name of what the candidate's step keeps, those of the baseline's that changed alike so far
    alone: names of what the candidate's step changed where nothing of the baseline's changed alike
    rearranged: names of what holds rows of the baseline's that the candidate keeps in another container
    """

    names: dict[str, set[str]] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)
    rearranged: set[str] = field(default_factory=set)

    def translated(
        self,
        seen: Observation,
        baseline: Observation,
        state: StepState,
        unit: float,
        spread: Mapping[str, Sequence[float]],
        drifted: bool,
        optimizer: Observation,
    ) -> tuple[Observation, list[Finding]]:
        """The candidate's observation with the baseline's names of what its step keeps in Python; and what is amiss.

        Schedules whose later rates are known are compared by these.

        spread:  by name, how far noise moves numbers of the baseline
        drifted: each arm made many steps before
        optimizer: holds the state of the candidate's optimizer, which may be what the baseline's step keeps by itself
        """
        ours, theirs = unpacked("remembers", seen), unpacked("remembers", baseline)
        named = {name for name in ours.keys() & theirs.keys() if state.alike_in_kind(ours[name], theirs[name])}
        named |= {name for name in ours.keys() | theirs.keys() if name.startswith(BY_NAME)}
        # Updates are computed with what the rules of both show; what a step sets for the next one shows in that.
        computed = shown(seen) & shown(baseline)
        ours, theirs = ({n: packed for n, packed in held.items() if n not in computed} for held in (ours, theirs))
        others = {name: packed for name, packed in ours.items() if name not in named}
        left_out = others.keys() | computed
        translated = {name: tensor for name, tensor in seen.items() if name.removeprefix("remembers/") not in left_out}
        translated |= {key: baseline[key] for name in computed if (key := f"remembers/{name}") in baseline}
        known, findings, unread = schedules(baseline), list[Finding](), list[str]()
        lone = theirs.keys() - named
        held = cache(lambda: state.pack(_before_and_after(optimizer)))
        for_people = cache(lambda: state.write_only(lone))  # it reads files, and few steps ask for it
        for name in sorted(lone):
            translated[f"remembers/{name}"] = baseline[f"remembers/{name}"]
            if name in known:
                continue
            lacks = partial(state.lacking, theirs=theirs[name], unit=unit, noise=spread.get(name, ()), drifted=drifted)
            lacking = lacks([*ours.values()])
            if any(lacking):  # real numbers: each optimizer counts its steps, which shows nothing
                lacking = lacks([*ours.values(), held()])
            if lacking and name in for_people():
                unread.append(name)
            elif (any(lacking) or len(lacking) > 1) and self._rearranged(
                name, state, [*ours.values()], theirs[name], unit, spread
            ):  # equal values of a lone count prove nothing
                findings.append(Finding(f"{NAMED}{name}", bitwise=True, message=REARRANGED.format(name)))
                continue
            else:
                findings += _amiss(name, lacking)
            if any(lacks([])):  # a real number: many things count alike
                self._meet(name, {other for other, packed in others.items() if not lacks([packed])})
        if unread:
            names = ", ".join(unread)
            findings.append(Finding(f"{NAMED}{names}", bitwise=True, message=FOR_PEOPLE.format(names)))
        self.alone |= {name for name in others if not self.names.get(name, set()) & theirs.keys()}
        findings += [broken(name, ALONE) for name in sorted(self.alone) if self.names.get(name)]
        return translated, findings

    def _rearranged(
        self,
        name: str,
        state: StepState,
        ours: Sequence[bytes],
        theirs: bytes,
        unit: float,
        spread: Mapping[str, Sequence[float]],
    ) -> bool:
        """Whether the candidate keeps the rows that the baseline writes. A step without new rows has the last answer.

        Not where it keeps something of the same form: a teacher that is replaced a step too early ends alike.
        """
        if any(state.same_form(packed, theirs) for packed in ours):
            return False
        found = state.rearranged(ours, theirs, unit, spread.get(name, ()))
        if found:
            self.rearranged.add(name)
        return bool(found) or (found is None and name in self.rearranged)

    def _meet(self, name: str, alike: set[str]) -> None:
        """Note a step in which some of what the candidate keeps changed as `name` of the baseline's did."""
        for other in alike:
            self.names.setdefault(other, {name})
        for other, names in self.names.items():
            if other not in alike:
                names.discard(name)


def _amiss(name: str, lacking: Sequence[bool]) -> Iterator[Finding]:
    """lacking: of each value without a counterpart, whether it is a real number"""
    if any(lacking):
        yield broken(name, LACKS)
    elif lacking:
        yield Finding(name, error_rms=0.0, unseen=COUNTS)


def _before_and_after(seen: Observation) -> tuple[dict[str, Any], dict[str, Any]]:
    """Optimizer state, by name; counts as the numbers that they are. Hyperparameters come from nothing, as those of an
    optimizer do that a step makes."""
    after = {name.removeprefix("after/"): t for name, t in seen.items() if name.startswith("after/optimizer/")}
    before = {name: seen.get(f"before/{name}", torch.zeros_like(tensor)) for name, tensor in after.items()}
    counts = {name for name, tensor in after.items() if is_count(tensor) and is_count(before[name])}
    one, other = ({n: int(t) if n in counts else t for n, t in held.items()} for held in (before, after))
    numbers = {name: n.value for name, n in all_hyperparameters(seen).items() if isinstance(n.value, float)}
    return one | dict.fromkeys(numbers, 0.0), other | numbers
