"""The rounding of an optimizer that asks for bfloat16 or float16: fp64 keeps a dtype that code asks for, and so takes
the baseline's rounding for the exact update.

Muon orthogonalizes in bfloat16: two honest forms of a product there leave updates some per cent apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from optexp.equivalence.fp64_quantities import updates
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.observation import Observation
from optexp.equivalence.quantities import Quantity, measured

ORDERS = 4  # reassociated steps; an optimizer that computes in float64 makes the same update in each


@contextmanager
def narrow_updates_allowed(
    inputs: InputSet, step: int, seen: Observation, exact: Mapping[str, Quantity]
) -> Iterator[None]:
    """Inside, an arm's update may have the error that other orders of sums make in the fp64 one.

    An update that passes inside alone is not verified: limits are the old ones afterwards.

    seen:  a run of the arm
    exact: its changes and optimizer state, beside fp64's in the usual order
    """
    yardsticks = inputs.yardsticks.steps[step]
    before = dict(yardsticks.allowed)
    try:
        for order in range(1, ORDERS + 1):
            moved = [*updates(inputs, step, seen, order=order)]
            for quantity in measured(replace(exact[other.name], value=other.reference) for other in moved):
                yardsticks.allow(quantity)
        yield
    finally:
        yardsticks.allowed = before
