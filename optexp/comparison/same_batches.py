"""Where a strategy builds another workload, whether its program is fed the baseline's batches.

Verification gives both programs the reference's batches, so nothing else looks at the loader of a second file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isclose, prod
from random import Random

from optexp.errors import NoReference
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import Fed, Given
from optexp.workers.reference import Reference

ROUNDINGS = 64 * 2.0**-24  # of the largest value: batches that are closer differ by rounding
LATER = 32  # batches behind the first ones: a difference in a tenth of them is missed once in 29 comparisons
SAME_MEAN = 1e-9  # relative: means over an epoch in another order are closer


@dataclass(frozen=True)
class Difference:
    """How the candidate's batches differ.

    rounding: by no more than rounding
    """

    text: str
    rounding: bool = False


@dataclass
class Feeds:
    """The feeds of both arms, and of the reference, which is the baseline's in another process.

    seed:      of the positions in an epoch that are compared beside the first batches
    looked_at: the batches that were compared, in words, where they are not all of an epoch
    """

    baseline: Client[Arm]
    candidate: Client[Arm]
    reference: Client[Reference]
    seed: int = 0
    looked_at: str = ""

    def difference(self) -> Difference | None:
        """How the candidate's batches differ; None where those that are compared do not.

        Raises:
            NoReference: Loaders draw random numbers, so that their batches need not be equal.
        """
        theirs, ours = self.baseline.call(Arm.fed), self.candidate.call(Arm.fed)
        if text := other_amounts(ours, theirs):
            return Difference("; ".join(filter(None, (text, other_sizes(ours, theirs)))))
        index = first_other(ours.batches, theirs.batches)
        if index is None:
            return self._later(ours, theirs)
        text, sized = other_sizes(ours, theirs), self.baseline.call(Arm.fed, other_seed=1)
        if text and not other_sizes(sized, theirs):  # else sizes are drawn
            return Difference(text)
        if not text:
            mine, other = (arm.call(Arm.shown, index=index) for arm in (self.candidate, self.baseline))
            text, rounding = other_values(mine, other, ours.batches[index], index)
            if rounding:
                return Difference(text, rounding=True)
        self._require_repeatable(ours, theirs, sized)
        return Difference(text)

    def _later(self, ours: Fed, theirs: Fed) -> Difference | None:
        """How batches behind the first ones differ; None where they do not, or are not the baseline's own twice."""
        first = min(len(ours.batches), len(theirs.batches))
        if not theirs.loads or (theirs.epoch is not None and theirs.epoch <= first):
            return None
        mine, other = dict[int, Given](), dict[int, Given]()
        if theirs.epoch is not None:
            chosen = positions(first, theirs.epoch, self.seed)
            other = self.baseline.call(Arm.fed_later, positions=chosen)
            mine = self.candidate.call(Arm.fed_later, positions=sorted(other))
        both = sorted(mine.keys() & other.keys())
        own = [at for at in both if at != theirs.epoch]
        others, beyond = f" and {len(own)} others at random" * bool(own), ", and the next one" * (len(own) < len(both))
        amount = f"{theirs.epoch or 'any number'}{beyond}"
        self.looked_at = f"loaders: the first {first} batches{others} of {amount} are compared"
        wrong = next((at for at in both if mine[at] != other[at]), None)
        if wrong is None or self.baseline.call(Arm.fed_later, positions=[wrong]) != {wrong: other[wrong]}:
            return None
        if (mine[wrong].shapes, mine[wrong].dtypes) != (other[wrong].shapes, other[wrong].dtypes):
            return Difference(f"its batch {wrong} holds {form(mine[wrong])}, the baseline's {form(other[wrong])}")
        values, expected = (arm.call(Arm.shown_later, position=wrong) for arm in (self.candidate, self.baseline))
        return Difference(*other_values(values, expected, mine[wrong], wrong))

    def _require_repeatable(self, ours: Fed, theirs: Fed, theirs_otherwise: Fed) -> None:
        """Raises NoReference where random numbers may be all that the batches differ by."""
        here = self.reference.call(Reference.fed, own=len(theirs.batches))
        again = self.baseline.call(Arm.fed)
        if not (like(theirs, again) and like(theirs, here)):
            raise NoReference(
                "the baseline's own batches are others each time: its data draw random numbers that torch.manual_seed"
                " does not reach, so the candidate's batches need not be equal"
            )
        if not theirs.loads:
            return
        drawn = not like(theirs, theirs_otherwise)
        if drawn and not like(ours, self.candidate.call(Arm.fed)):
            raise NoReference(
                "both loaders draw random numbers, the candidate's such that torch.manual_seed does not reach: their"
                " batches need not be equal"
            )
        ours_otherwise = self.candidate.call(Arm.fed, other_seed=1)
        if (
            drawn
            and not like(ours, ours_otherwise)
            and not other_epoch((ours, ours_otherwise), (theirs, theirs_otherwise))
        ):
            raise NoReference(
                "both loaders draw random numbers, and not the same ones from one seed, as of another sampler or in"
                " other worker processes: their batches need not be equal"
            )


def positions(first: int, epoch: int, seed: int) -> list[int]:
    """Positions of batches behind the first ones. The last of the epoch is always among them, and the first of the next
    one, which a loader that never shuffles again repeats."""
    behind = range(first, epoch - 1)
    return sorted({epoch - 1, epoch, *Random(seed).sample(behind, min(LATER, len(behind)))})


def other_amounts(ours: Fed, theirs: Fed) -> str:
    """Other origins of batches, or other numbers of them, in words; empty where they are the same."""
    if ours.loads is not theirs.loads:
        origins = [f"come from {'a data loader' if fed.loads else 'get_inputs()'}" for fed in (ours, theirs)]
        return f"its batches {origins[0]}, the baseline's {origins[1]}"
    parts = []
    for what, mine, other in (("batches", ours.epoch, theirs.epoch), ("samples", ours.samples, theirs.samples)):
        if mine is not None and other is not None and mine != other:
            parts.append(f"{mine} {what} an epoch (the baseline's {other})")
    return f"its loader gives {', '.join(parts)}" if parts else ""


def other_sizes(ours: Fed, theirs: Fed) -> str:
    """The first batch of another form, in words; empty where there is none."""
    for index, (mine, other) in enumerate(zip(ours.batches, theirs.batches, strict=False)):
        if mine.shapes != other.shapes or mine.dtypes != other.dtypes:
            return f"its batch {index} holds {form(mine)}, the baseline's {form(other)}"
    return ""


def form(batch: Given) -> str:
    """Names, shapes and dtypes of a batch's inputs, in words."""
    return ", ".join(f"{name} {shape} {batch.dtypes[name]}" for name, shape in batch.shapes.items())


def first_other(ours: Sequence[Given], theirs: Sequence[Given]) -> int | None:
    """Index of the first batch that differs."""
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((index for index, (mine, other) in pairs if mine != other), None)


def like(one: Fed, other: Fed) -> bool:
    """Whether one starts as the other does."""
    return first_other(one.batches, other.batches) is None


def other_values(
    ours: Mapping[str, Sequence[float]], theirs: Mapping[str, Sequence[float]], batch: Given, index: int
) -> tuple[str, bool]:
    """How elements of one batch differ, in words, and whether rounding explains it."""
    worst = 0.0
    text = f"its batch {index} holds other values than the baseline's"
    for name, values in ours.items():
        largest = max(map(abs, theirs[name]), default=0.0)
        apart = [abs(mine - other) for mine, other in zip(values, theirs[name], strict=True)]
        far = max(apart, default=0.0) / largest if largest else max(apart, default=0.0)
        if far > worst:
            worst, at = far, apart.index(max(apart))
            text = (
                f"its batch {index} holds other values: an element of {name} {batch.shapes[name]} is {values[at]:.6g},"
                f" the baseline's {theirs[name][at]:.6g}"
            )
    return text, 0.0 < worst <= ROUNDINGS


def other_epoch(ours: Sequence[Fed], theirs: Sequence[Fed]) -> bool:
    """Whether an epoch has other samples, in whatever order: its means hang on no seed, and differ."""
    mine, other = (means_of(feds) for feds in (ours, theirs))
    return mine is not None and other is not None and not close(mine, other)


def means_of(feds: Sequence[Fed]) -> dict[str, float] | None:
    """Means over an epoch, where it was seen whole and they are the same for every seed; else None."""
    found = [epoch_means(fed) for fed in feds]
    first = found[0]
    same = first is not None and all(other is not None and close(first, other) for other in found)
    return first if same else None


def epoch_means(fed: Fed) -> dict[str, float] | None:
    """Mean of each real input over an epoch; None where it was not seen whole."""
    if not fed.epoch or len(fed.batches) < fed.epoch:
        return None
    sums, counts = dict[str, float](), dict[str, int]()
    for batch in fed.batches[: fed.epoch]:
        for name, mean in batch.means.items():
            size = prod(batch.shapes[name])
            sums[name], counts[name] = sums.get(name, 0.0) + mean * size, counts.get(name, 0) + size
    return {name: total / counts[name] for name, total in sums.items()}


def close(ours: Mapping[str, float], theirs: Mapping[str, float]) -> bool:
    """Whether all means are the same but for the order of their sums."""
    return ours.keys() == theirs.keys() and all(
        isclose(value, theirs[name], rel_tol=SAME_MEAN, abs_tol=SAME_MEAN) for name, value in ours.items()
    )
