"""Changes that a step makes to its model's Python state, beside those of the baseline's step.

Results come first: an attribute that a few consecutive steps change shows in them, where they depend on it. What shows
in none may still be left for later calls, or for its readers: the same model must then go on as the baseline's does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import zip_longest

from torch import Tensor

from optexp.equivalence.observation import NAMES, Observation, unpacked
from optexp.equivalence.optimizer_rules import LEFT as LEFT
from optexp.python_state import likeness, model_state
from optexp.python_state.model_state import Change
from optexp.records.verification import Finding, broken

NAMED = "attribute "  # before the name of what is no tensor
TAKEN = "the step changes it; the baseline leaves it alone"
OTHER = "the step leaves something else there than the baseline does"
STARTS = "steps do not start from what the baseline starts from"


class Attributes:
    """Values that runs of the baseline give each attribute, and how far noise moves them."""

    def __init__(self) -> None:
        self.met: dict[tuple[int, str], tuple[Change, bool]] = {}  # of a first run of each step; with noise?
        self.blurred: dict[str, list[float]] = {}

    def meet(self, step: int, seen: Observation) -> None:
        """One more run of the baseline."""
        noisy = bool(seen["flag/noisy"])
        perturbed = noisy or int(seen["flag/reassociated"]) > 0
        for name, change in changes(seen).items():
            first, disturbed = self.met.setdefault((step, name), (change, noisy))
            if perturbed and not likeness.same_start(change.pair, first.pair):
                continue  # a late step's yardsticks are runs of a first step, where counts are others
            apart = likeness.apart(change.pair, first.pair)
            self.blurred[name] = list(map(max, zip_longest(apart, self.blurred.get(name, ()), fillvalue=0.0)))
            if disturbed and not noisy:
                self.met[step, name] = change, noisy

    def compare(
        self, seen: Observation, baseline: Observation, unit: float, drifted: bool = False
    ) -> Iterator[Finding]:
        """Where the candidate's step goes on otherwise. Of another model than the baseline's, whose attributes are its
        own affair, only tensors that both keep count, in the same places of a list or a dict.

        unit:    u of the arithmetic
        drifted: each arm made many steps before
        """
        another, held = bool(seen["flag/another_model"]), _names(seen)
        made, expected = changes(seen), changes(baseline)
        for name in sorted(made | expected):
            ours, theirs = made.get(name), expected.get(name)
            if (text := self._differs(name, ours, theirs, unit, drifted)) is None:
                continue
            own = another and _own_affair(ours, theirs, name in held)
            if own or not any(change is not None and change.state for change in (ours, theirs)):
                yield Finding(NAMED + name, bitwise=True, message=f"{NAMED}{name}: {text}; it shows in no result")
            else:
                yield broken(NAMED + name, text)

    def _differs(self, name: str, ours: Change | None, theirs: Change | None, unit: float, drifted: bool) -> str | None:
        if ours is None or theirs is None:
            change = ours or theirs
            # An attribute that the first step alone changes does no harm: results of later steps say so.
            if change is None or not (change.begun and change.state):
                return None
            return LEFT if ours is None else TAKEN
        if likeness.alike(ours.pair, theirs.pair, unit, self.blurred.get(name, ()), drifted):
            return None
        return OTHER


def _own_affair(ours: Change | None, theirs: Change | None, held: bool) -> bool:
    """Whether the candidate's model, another one than the baseline's, is free to differ here.

    It is in counts, in attributes that one of the models lacks, and in lists and dicts with other entries. Later steps
    show the consequences.

    held: the candidate's model has an attribute of that name
    """
    if any(change is not None and not change.numbers for change in (ours, theirs)):
        return True
    if ours is None or theirs is None:
        return theirs is None or not held
    return not likeness.alike_in_kind(ours.pair, theirs.pair)


def _names(seen: Observation) -> set[str]:
    """Names of what another model than the baseline's keeps in Python."""
    packed = seen.get(NAMES)
    return set() if packed is None else {*packed.cpu().numpy().tobytes().decode().splitlines()}


def changes(observation: Mapping[str, Tensor]) -> dict[str, Change]:
    """By name, what the step changed."""
    return {name: model_state.unpacked(packed) for name, packed in unpacked("moves", observation).items()}
