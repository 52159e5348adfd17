"""Tiny elements of a result that its inputs determine: a rounding of these leaves such an element what it is.

Where two equal scores meet opposite values, a softmax leaves the rest of a sum that cancels: it is right where scores
are exact, and another number as soon as one of them is rounded, as by a scale that goes into the queries.
"""

from __future__ import annotations

from dataclasses import replace

from optexp.equivalence.fp64_variants import with_rounded_inputs
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.observation import Observation
from optexp.equivalence.quantities import EXACT_ENOUGH, Quantity, measured, whole
from optexp.support.tolerances import SMALL


def determined(inputs: InputSet, step: int, seen: Observation, tiny: Quantity) -> Quantity | None:
    """The tiny elements that keep their values if inputs and parameters are rounded otherwise; None if few do.

    seen: the observation with these elements
    """
    assert tiny.columns is not None
    start, unit = inputs.fp64.start_of(step, seen), inputs.arithmetic.row.unit
    moved = with_rounded_inputs(inputs.fp64, step, start, unit).get(whole(tiny.name))
    if moved is None or tuple(moved.shape) != tiny.within:
        return tiny
    off = (moved.reshape(-1)[tiny.columns.to(moved.device)].to(tiny.reference) - tiny.reference).abs()
    kept = off <= EXACT_ENOUGH * tiny.reference.abs()
    if int(kept.sum()) < SMALL:
        return None
    columns = tiny.columns[kept.to(tiny.columns.device)]
    few = replace(tiny, value=tiny.value[kept], reference=tiny.reference[kept], columns=columns)
    return next(measured([few]))
