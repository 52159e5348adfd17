"""The rounding of an optimizer that asks for bfloat16 or float16: fp64 keeps a dtype that code asks for, and so takes
the baseline's rounding for the exact update.

Muon orthogonalizes in bfloat16: two honest forms of a product there leave updates some per cent apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from optexp.equivalence.fp64_quantities import updates
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.observation import Observation
from optexp.equivalence.quantities import Quantity, measured

ORDERS = 4  # of sums, each with other roundings; of an optimizer that computes in float64 these move nothing


def allow_narrow_updates(inputs: InputSet, step: int, seen: Observation, exact: Mapping[str, Quantity]) -> None:
    """Allow an arm's update the error that other orders of sums make in the fp64 one. What passes then is not verified.

    seen:  a run of the arm
    exact: its changes and optimizer state, beside fp64's in the usual order
    """
    for order in range(1, ORDERS + 1):
        moved = [*updates(inputs, step, seen, order=order)]
        for quantity in measured(replace(exact[other.name], value=other.reference) for other in moved):
            inputs.yardsticks.steps[step].allow(quantity)
