"""Names of the same state in two programs that were written apart, matched by values.

A second file may give an average or an optimizer's state another name, hold it in another object, and keep more than
the baseline does. What later steps and readers of the baseline's state depend on is its values: each must be somewhere
in the other program, and change there alike. What the other program keeps beside them shows in later results, or in
none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial

import torch
from torch import Tensor

from optexp.equivalence.attributes import NAMED
from optexp.equivalence.observation import Observation, unpacked
from optexp.equivalence.schedules import schedules
from optexp.program import StepState
from optexp.program.counters import is_counted
from optexp.records.verification import Finding, broken

FAR = 0.02  # relative: two names whose tensors are further apart are no name of the same state
BY_NAME = ("optimizer/", "random", "numpy.random")  # state that both programs keep by the same name
LACKS = "the baseline changes it; nothing that the second program keeps changes as it does"
FOR_PEOPLE = (
    "the baseline keeps {}, which nothing in its files reads but its own update and what prints it: the second program"
    " keeps nothing like it, and need not"
)
ALONE = "it changes as something of the baseline's does, and at times alone"
COUNTS = (
    "the baseline counts it on, and nothing that the second program keeps counts alike: what later steps make of it was"
    " not seen; keep it in both, or in neither"
)
INSTEAD = (
    "the baseline's optimizer keeps it, and the second program's keeps {} instead, with other values: updates after the"
    " first one cannot be computed from that"
)

Names = Mapping[str, Mapping[str, Tensor]]  # by key of optimizer state: by time and parameter, the tensor


@dataclass
class Counterparts:
    """Names of the same state in both programs of a comparison.

    keys:  by a key of the candidate's optimizer state, the baseline's
    names: by a name of what the candidate's step keeps in Python, those of the baseline's that changed alike so far
    alone: names of what the candidate's step changed where nothing of the baseline's changed alike
    """

    keys: dict[str, str] = field(default_factory=dict)
    names: dict[str, set[str]] = field(default_factory=dict)
    alone: set[str] = field(default_factory=set)

    def translated(self, seen: Observation, baseline: Observation) -> tuple[Observation, dict[str, str]]:
        """The candidate's observation with the baseline's names of optimizer state, and without other such state; and,
        by key, what it keeps in place of a tensor of the baseline's.

        A count that only the baseline keeps is taken from it: updates show whether the candidate's are those of it.
        """
        if seen["flag/apart"]:
            seen = {name: tensor for name, tensor in seen.items() if name in baseline or not _counted(name)}
        ours, theirs = _by_key(seen), _by_key(baseline)
        more = {key: held for key, held in ours.items() if key not in theirs}
        lacking = {key: held for key, held in theirs.items() if key not in ours}
        if not more and not lacking:
            return seen, {}
        self.keys |= _paired(more, lacking)
        found = {key: other for key, other in self.keys.items() if key in more and other in lacking}
        translated, instead = {n: tensor for n, tensor in seen.items() if _key(n) not in more}, dict[str, str]()
        translated |= {_named(n, found[_key(n)]): tensor for n, tensor in seen.items() if _key(n) in found}
        for key, held in lacking.items():
            if key in found.values():
                continue
            if all(tensor.numel() == 1 for tensor in held.values()):
                translated |= {name: tensor for name, tensor in baseline.items() if _key(name) == key}
            elif others := [k for k in more if k not in found and _shapes(more[k]) == _shapes(held)]:
                instead[key] = others[0]
        return translated, instead

    def remembered(
        self,
        seen: Observation,
        baseline: Observation,
        state: StepState,
        unit: float,
        spread: Mapping[str, Sequence[float]],
        drifted: bool,
    ) -> tuple[Observation, list[Finding]]:
        """The candidate's observation with the baseline's names of what its step keeps in Python; and what is amiss.

        Schedules whose later rates are known are compared by these.

        spread:  by name, how far noise moves numbers of the baseline
        drifted: each arm made many steps before
        """
        ours, theirs = unpacked("remembers", seen), unpacked("remembers", baseline)
        named = {name for name in ours.keys() & theirs.keys() if state.alike_in_kind(ours[name], theirs[name])}
        named |= {name for name in ours.keys() | theirs.keys() if name.startswith(BY_NAME)}
        others = {name: packed for name, packed in ours.items() if name not in named}
        translated = {name: tensor for name, tensor in seen.items() if name.removeprefix("remembers/") not in others}
        known, findings, unread = schedules(baseline), list[Finding](), list[str]()
        lone = theirs.keys() - named
        for_people = cache(lambda: state.write_only(lone))  # it reads files, and few steps ask for it
        for name in sorted(lone):
            translated[f"remembers/{name}"] = baseline[f"remembers/{name}"]
            if name in known:
                continue
            lacks = partial(state.lacking, theirs=theirs[name], unit=unit, noise=spread.get(name, ()), drifted=drifted)
            if (lacking := lacks([*ours.values()])) and name in for_people():
                unread.append(name)
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

    def _meet(self, name: str, alike: set[str]) -> None:
        """Note a step in which some of what the candidate keeps changed as `name` of the baseline's did."""
        for other in alike:
            self.names.setdefault(other, {name})
        for other, names in self.names.items():
            if other not in alike:
                names.discard(name)


def without(seen: Observation, keys: Mapping[str, str]) -> Observation:
    """An observation without optimizer state of these keys."""
    return {name: tensor for name, tensor in seen.items() if _key(name) not in keys}


def instead_of(key: str, other: str) -> Finding:
    """Updates from optimizer state that the baseline's optimizer does not have are unseen."""
    return Finding(f"optimizer/{key}", error_rms=0.0, unseen=INSTEAD.format(other))


def _amiss(name: str, lacking: Sequence[bool]) -> Iterator[Finding]:
    """lacking: of each value without a counterpart, whether it is a real number"""
    if any(lacking):
        yield broken(name, LACKS)
    elif lacking:
        yield Finding(name, error_rms=0.0, unseen=COUNTS)


def _by_key(seen: Observation) -> dict[str, dict[str, Tensor]]:
    """The optimizer state of parameters before and after a step: by key, and by time and parameter."""
    found = dict[str, dict[str, Tensor]]()
    for name, tensor in seen.items():
        if key := _key(name):
            found.setdefault(key, {})[name.removesuffix(f"/{key}")] = tensor
    return found


def _key(name: str) -> str:
    """Of the optimizer state of a parameter, before or after a step; empty of anything else."""
    when, _, rest = name.partition("/")
    kind, _, path = rest.partition("/")
    owner, _, key = path.partition("/")
    other = when not in ("before", "after") or kind != "optimizer" or _counted(name)
    return "" if other or (owner.startswith("group") and key == "lr") else key


def _counted(name: str) -> bool:
    return is_counted(name.partition("/")[2])


def _named(name: str, key: str) -> str:
    when, kind, owner, _ = name.split("/", 3)
    return f"{when}/{kind}/{owner}/{key}"


def _shapes(held: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {owner: tensor.shape for owner, tensor in held.items()}


def _paired(ours: Names, theirs: Names) -> dict[str, str]:
    """By the key of one, the key of the other that holds nearly the same; each at most once, the nearest first."""
    far = {
        (key, other): _apart(held, theirs[other])
        for key, held in ours.items()
        for other in theirs
        if _shapes(held) == _shapes(theirs[other])
    }
    found = dict[str, str]()
    for (key, other), distance in sorted(far.items(), key=lambda entry: entry[1]):
        if distance <= FAR and key not in found and other not in found.values():
            found[key] = other
    return found


def _apart(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> float:
    """RMS of the difference over all parameters, relative to the second."""
    pairs = [(ours[owner].to(torch.float64), tensor.to(torch.float64)) for owner, tensor in theirs.items()]
    error = sum(float((a - b.to(a.device)).square().sum()) for a, b in pairs)
    size = sum(float(b.square().sum()) for _, b in pairs)
    return 0.0 if error == 0 else (error / size) ** 0.5 if size else float("inf")
