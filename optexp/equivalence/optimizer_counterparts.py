"""Names of the same optimizer state in two programs, matched by values.

A second optimizer may give its state another name, and hold it in lists, in one row, or in what the step keeps. Updates
depend on its values: each must be somewhere in the other program.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from optexp.equivalence.observation import Observation, unpacked
from optexp.program import StepState
from optexp.program.counters import PREFIX, is_counted
from optexp.records.verification import Finding

FAR = 0.02  # relative: two names whose tensors are further apart are no name of the same state
INSTEAD = (
    "the baseline's optimizer keeps it, and the second program's keeps {} instead, with other values: updates after the"
    " first one cannot be computed from that"
)

LISTED = re.compile(rf"({PREFIX}.+)/(\d+)")  # an entry of a list that an optimizer keeps beside its parameters' state


@dataclass(frozen=True)
class Slot:
    """A tensor of optimizer state, and its name in the observation."""

    name: str
    tensor: Tensor


Family = dict[str, Slot]  # the same state of all parameters: by time and parameter, as in after/0.weight


@dataclass
class OptimizerCounterparts:
    """keys: by a key of the candidate's optimizer state, the baseline's"""

    keys: dict[str, str] = field(default_factory=dict)

    def translated(
        self, seen: Observation, baseline: Observation, state: StepState | None = None
    ) -> tuple[Observation, dict[str, str]]:
        """The candidate's observation with the baseline's names of optimizer state, and without other such state; and,
        by key, what it keeps in place of a tensor of the baseline's.

        A count that only the baseline keeps is taken from it: updates show whether the candidate's are those of it.

        state: of the step, which may keep what updates need by itself; None where it keeps nothing
        """
        if seen["flag/apart"]:
            laid_out = {
                name for name, tensor in seen.items() if _key(name) and _is_laid_out(tensor, baseline.get(name))
            }
            seen = seen | {name: seen[name].reshape(baseline[name].shape) for name in laid_out}
        learning = {name.split("/")[2] for name in (*seen, *baseline) if _key(name)}  # a frozen one has no state
        ours, theirs = _families(seen, learning), _families(baseline, learning)
        if seen["flag/apart"]:  # after families, as state in lists is counted
            seen = {name: tensor for name, tensor in seen.items() if name in baseline or not _counted(name)}
        more = {key: held for key, held in ours.items() if key not in theirs}
        lacking = {key: held for key, held in theirs.items() if key not in ours}
        if not more and not lacking:
            return seen, {}
        self.keys |= _paired(more, lacking)
        found = {key: other for key, other in self.keys.items() if key in more and other in lacking}
        of_more = {slot.name for held in more.values() for slot in held.values()}
        translated, instead = {n: tensor for n, tensor in seen.items() if n not in of_more}, dict[str, str]()
        for key, other in found.items():
            translated |= _by_name(lacking[other], {place: slot.tensor for place, slot in more[key].items()})
        for key, held in lacking.items():
            if key in found.values():
                continue
            if all(slot.tensor.numel() == 1 for slot in held.values()):
                translated |= _by_name(held, {})
            elif state is not None and seen["flag/apart"] and (kept := _kept(held, seen, state)):
                translated |= _by_name(held, kept)
            elif _is_row(held) and _counted(next(iter(held.values())).name):
                continue  # updates are computed from the baseline's own
            elif others := [k for k in more if k not in found and _fit(more[k], held)]:
                instead[key] = others[0]
        return translated, instead


def without(seen: Observation, keys: Mapping[str, str]) -> Observation:
    """An observation without optimizer state of these keys."""
    return {name: tensor for name, tensor in seen.items() if _key(name) not in keys}


def instead_of(key: str, other: str) -> Finding:
    """Updates from optimizer state that the baseline's optimizer does not have are unseen."""
    return Finding(f"optimizer/{key}", error_rms=0.0, unseen=INSTEAD.format(other))


def moved_counts(seen: Observation, baseline: Observation) -> set[str]:
    """Counts that the baseline's optimizer keeps beside its parameters' state, and that the second program's keeps
    elsewhere, as in each parameter's state: names without a time. Such a count moves by as much, by any name."""
    if not seen["flag/apart"]:
        return set()
    theirs = _steps_of_counts(baseline)
    ours = {by for name, by in _steps_of_counts(seen).items() if name not in theirs and by}
    return {name for name, by in theirs.items() if is_counted(name) and by in ours}


def _steps_of_counts(seen: Observation) -> dict[str, float]:
    """By how much a step moves each count of optimizer state, which may begin in it."""
    found = dict[str, float]()
    for name, after in seen.items():
        if name.startswith("after/optimizer/") and is_count(after):
            before = seen.get(name.replace("after/", "before/", 1))
            found[name.removeprefix("after/")] = float(after) - (0.0 if before is None else float(before))
    return found


def _families(seen: Observation, learning: Collection[str]) -> dict[str, Family]:
    """The optimizer state of parameters: by key, in the parameters' entries, in lists with one of each parameter, or in
    one row with all of them.

    learning: names of parameters that an optimizer holds, where they are known
    """
    owners = [name.removeprefix("before/param/") for name in seen if name.startswith("before/param/")]
    owners = [owner for owner in owners if owner in learning] or owners
    shapes = [seen[f"before/param/{owner}"].shape for owner in owners]
    row = (sum(map(math.prod, shapes)),) if len(owners) > 1 else None
    found = dict[str, Family]()
    for name, tensor in seen.items():
        when, _, rest = name.partition("/")
        if when in ("before", "after") and rest.startswith("optimizer/") and tensor.shape == row:
            parts = zip(owners, shapes, tensor.split([*map(math.prod, shapes)]), strict=True)
            held = {f"{when}/{owner}": Slot(name, part.view(shape)) for owner, shape, part in parts}
            found.setdefault(rest, {}).update(held)
        elif key := _key(name):
            owner = rest.split("/")[1]
            found.setdefault(key, {})[f"{when}/{owner}"] = Slot(name, tensor)
        elif (listed := LISTED.fullmatch(rest)) and when in ("before", "after") and int(listed[2]) < len(owners):
            found.setdefault(listed[1], {})[f"{when}/{owners[int(listed[2])]}"] = Slot(name, tensor)
    partial = {key for key, held in found.items() if LISTED.fullmatch(f"{key}/0") and not _of_all(held, owners, seen)}
    return {key: held for key, held in found.items() if key not in partial}


def _is_row(held: Family) -> bool:
    """Whether a single tensor holds the state of all parameters."""
    return len({slot.name for slot in held.values() if slot.name.startswith("after/")}) == 1 < len(held)


def _of_all(held: Family, owners: Sequence[str], seen: Observation) -> bool:
    """Whether a list holds one tensor for each parameter, with the parameter's shape."""
    return all(
        (slot := held.get(f"after/{owner}")) is not None and slot.tensor.shape == seen[f"before/param/{owner}"].shape
        for owner in owners
    )


def _key(name: str) -> str:
    """Of the optimizer state of a parameter, before or after a step; empty of anything else."""
    when, _, rest = name.partition("/")
    kind, _, path = rest.partition("/")
    owner, _, key = path.partition("/")
    other = when not in ("before", "after") or kind != "optimizer" or _counted(name)
    return "" if other or (owner.startswith("group") and key == "lr") else key


def _counted(name: str) -> bool:
    return is_counted(name.partition("/")[2])


def _fit(ours: Family, theirs: Family) -> bool:
    """Whether both cover the same parameters after the step, with equal shapes. Before the step one may be absent."""
    after = [{place for place in held if place.startswith("after/")} for held in (ours, theirs)]
    common = ours.keys() & theirs.keys()
    return after[0] == after[1] and all(ours[place].tensor.shape == theirs[place].tensor.shape for place in common)


def _paired(ours: Mapping[str, Family], theirs: Mapping[str, Family]) -> dict[str, str]:
    """By the key of one, the key of the other that holds nearly the same; each at most once, the nearest first."""
    far = {
        (key, other): _apart(held, theirs[other])
        for key, held in ours.items()
        for other in theirs
        if _fit(held, theirs[other])
    }
    found = dict[str, str]()
    for (key, other), distance in sorted(far.items(), key=lambda entry: entry[1]):
        if distance <= FAR and key not in found and other not in found.values():
            found[key] = other
    return found


def _apart(ours: Family, theirs: Family) -> float:
    """RMS of the difference over all parameters, relative to the second. Counts that differ are not the same state,
    however close they are after many steps."""
    places = ours.keys() & theirs.keys()
    pairs = [(ours[p].tensor, theirs[p].tensor) for p in places]
    far = _far(pairs)
    return float("inf") if far and all(is_count(t) for pair in pairs for t in pair) else far


def _is_laid_out(ours: Tensor, theirs: Tensor | None) -> bool:
    """Whether shapes differ by dimensions of size 1 alone, as those of sums with and without `keepdim`."""
    return theirs is not None and ours.shape != theirs.shape and ours.squeeze().shape == theirs.squeeze().shape


def is_count(tensor: Tensor) -> bool:
    return tensor.numel() == 1 and float(tensor).is_integer()


def _far(pairs: Sequence[tuple[Tensor, Tensor]]) -> float:
    """RMS of the differences, relative to the second tensors."""
    wide = [(ours.to(torch.float64), theirs.to(ours.device, torch.float64)) for ours, theirs in pairs]
    error = sum(float((a - b).square().sum()) for a, b in wide)
    size = sum(float(b.square().sum()) for _, b in wide)
    return 0.0 if error == 0 else (error / size) ** 0.5 if size else float("inf")


def _by_name(theirs: Family, ours: Mapping[str, Tensor]) -> Observation:
    """Our state, by time and parameter, under the names of theirs; state that ours lacks is taken from theirs."""
    found = dict[str, list[Tensor]]()
    for place, slot in theirs.items():
        found.setdefault(slot.name, []).append(ours.get(place, slot.tensor))
    return {n: parts[0] if len(parts) == 1 else torch.cat([p.flatten() for p in parts]) for n, parts in found.items()}


def _kept(theirs: Family, seen: Observation, state: StepState) -> dict[str, Tensor]:
    """By time and parameter, the same state where the step keeps it by itself, as in a dict or in optimizers that it
    makes; nothing where that of one parameter is missing."""
    values = state.values([*unpacked("remembers", seen).values()])
    kept = {place: (then, now.detach()) for place, (then, now) in enumerate(values) if isinstance(now, Tensor)}
    sizes = {place: float(now.to(torch.float64).norm()) for place, (_, now) in kept.items()}
    found = dict[str, Tensor]()
    for place, slot in theirs.items():
        when, _, owner = place.partition("/")
        if when != "after":
            continue
        size = float(slot.tensor.to(torch.float64).norm())  # most others have another one, and are not looked at
        near = {index for index, other in sizes.items() if abs(other - size) <= FAR * size}
        fitting = {index: now for index, (_, now) in kept.items() if index in near and now.shape == slot.tensor.shape}
        far = {index: _far([(now, slot.tensor)]) for index, now in fitting.items()}
        nearest = min(far, key=far.__getitem__, default=None)
        if nearest is None or far[nearest] > FAR:
            return {}
        then, found[place] = kept.pop(nearest)
        if earlier := theirs.get(f"before/{owner}"):
            same = isinstance(then, Tensor) and then.shape == earlier.tensor.shape
            found[f"before/{owner}"] = then.detach() if same else earlier.tensor
    return found
