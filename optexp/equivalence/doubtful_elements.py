"""Elements of a parameter's change that are nothing but rounding, where no known optimizer tells what follows from it.

A gradient that is zero but for rounding has another sign in each honest run, and Adam makes a full step of it. Where
optexp knows the optimizer, an update is compared with an fp64 one on the arm's own gradients. Of an optimizer that a
step makes itself, only runs of the baseline, with noise and in other orders, tell which elements this concerns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil

from torch import Tensor

from optexp.equivalence.quantities import MOST, Quantity, measured
from optexp.support.tolerances import SCARCE

OF_ITSELF = 0.5  # an element whose error in a run of the baseline exceeds this share of its value is rounding
FACTOR = 4.0  # times the largest such error: the most that rounding makes of such an element
TURNED = 0.02  # of the elements of a change, of which `most_elements` has no more
ROUNDED = 40.0  # the same beside larger changes: compiled sums of zero were seen 38 times as far off


@dataclass(frozen=True)
class Doubtful:
    """Elements of one parameter's change that are rounding.

    elements: a mask of the parameter's shape
    largest:  the largest error that a run of the baseline has in them
    """

    elements: Tensor
    largest: float

    @classmethod
    def of(cls, quantity: Quantity) -> Doubtful:
        """Elements that one run of the baseline shows to be rounding."""
        error = _error(quantity)
        elements = error > OF_ITSELF * quantity.reference.abs()
        return cls(elements, float(error.where(elements, 0.0).max()) if error.numel() else 0.0)

    def __or__(self, other: Doubtful) -> Doubtful:
        """Elements that either of two runs shows to be rounding."""
        return Doubtful(self.elements | other.elements, max(self.largest, other.largest))

    def spared(self, quantity: Quantity, usual: float) -> Quantity:
        """The change without errors that rounding explains: these elements have float64's value.

        An element with a larger error keeps it, and is judged as all others are.

        usual: the largest change of any element in fp64
        """
        most = max(FACTOR * self.largest, min(ROUNDED * self.largest, usual))
        explained = self.elements & (_error(quantity) <= most + quantity.resolution[1])
        if not bool(explained.any()):
            return quantity
        return next(measured([replace(quantity, value=quantity.value.where(~explained, quantity.reference))]))


def most_elements(quantity: Quantity) -> Iterator[Quantity]:
    """A change without the elements that are farthest off, which gradients near zero may have turned around: a wrong
    rate shows in all others. Nothing of a change of few elements."""
    number = quantity.value.numel()
    if number < SCARCE or quantity.value.shape != quantity.reference.shape:
        return
    least = _error(quantity).reshape(-1).argsort()[: number - ceil(TURNED * number)]
    value, reference = quantity.value.reshape(-1)[least], quantity.reference.reshape(-1)[least]
    stored = None if quantity.stored is None else quantity.stored.reshape(-1)[least]
    places, shape = least.cpu(), tuple(quantity.value.shape)
    part = Quantity(
        quantity.name + MOST, value, reference, quantity.limits, None, stored, columns=places, axis=0, within=shape
    )
    yield from measured([part])


def _error(quantity: Quantity) -> Tensor:
    """|c−g| of each element; NaN where either is."""
    return (quantity.value - quantity.reference).abs()
