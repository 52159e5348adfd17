"""The gates on one quantity of the candidate, with the limits that the set's yardsticks give it."""

from __future__ import annotations

from dataclasses import replace
from math import inf

import torch
from torch import Tensor

from optexp.equivalence.far_off import far_off
from optexp.equivalence.gates import Limits, Yardstick, exact, measure
from optexp.equivalence.gradient_terms import all_terms
from optexp.equivalence.input_families import integers
from optexp.equivalence.input_set import InputSet
from optexp.equivalence.noise import alone
from optexp.equivalence.quantities import Quantity, is_exact, is_part, source
from optexp.equivalence.sight import unseen
from optexp.equivalence.tensor_math import Error, name_of
from optexp.program import lazy
from optexp.records.verification import Finding, broken
from optexp.support.tolerances import SMALL

LAZY = "the step returns an iterator, whose values are computed only on demand: return a list"
FEW = 1024.0  # u: the share of a lone module's integers that may be near ties


def compare(inputs: InputSet, quantity: Quantity) -> Finding:
    """The finding of G1 to G3, CAP or EXACT about one quantity of the set's current step."""
    name = quantity.name.removeprefix("out/")
    if not quantity.value.numel():
        message = f"{name} has no element to compare"
        return Finding(name, "EXACT", message=message, error_rms=0.0 if lazy(name) else None)
    if quantity.name in inputs.traits.unrepeated_integers:
        return Finding(name, "EXACT", message=f"{name} is another one in every run of the baseline: not compared")
    if is_exact(quantity.value):
        return _compare_integers(inputs, quantity, name)
    arithmetic = inputs.arithmetic
    if quantity.found.lost and not arithmetic.keeps_precision and (count := _overflows(inputs, quantity)):
        everything = f"{count} of {quantity.value.numel()} elements"
        return broken(name, f"{everything} are NaN or Inf, and finite in float64: {arithmetic.name} overflows here")
    yardstick, plain, found = inputs.yardstick(quantity), inputs.plain(quantity), _located(quantity)
    measured = measure(name, found, quantity.scale, yardstick, plain, _limits(inputs, quantity, plain))
    finding = replace(measured, zero=quantity.terms > 0)
    exactly = inputs.fp64.family == integers.__name__ and quantity.reference.numel() >= SMALL
    if exactly and not plain.peak and found.peak:
        text = f"sums of small integers are exact in the baseline, and off by up to {found.peak:.3g} here"
        finding = replace(finding, gate="EXACT", ok=False, failed=("EXACT",), used=inf, message=text)
    return _with_dtype(inputs, quantity, finding)


def _compare_integers(inputs: InputSet, quantity: Quantity, name: str) -> Finding:
    """EXACT, with near ties: an integer may be that of a noisy run of the baseline."""
    baseline, shape = inputs.baseline[source(quantity.name)], quantity.value.shape
    runs = inputs.yardsticks.current.moved_integers.get(quantity.name, [])
    moved = [run for run in runs if run.shape == shape]  # the number of integers may depend on rounding
    if alone(inputs.fp64.program.model):  # noise moved its parameters, and with them the values on a grid
        differing, few = (
            int((quantity.value != baseline).sum()),
            FEW * inputs.arithmetic.row.unit * quantity.value.numel(),
        )
        moved = [] if differing > max(1.0, few) else moved
    return exact(name, quantity.value, baseline, quantity.reference, moved)


def _located(quantity: Quantity) -> Error:
    """The error of a quantity, its worst element indexed in the whole tensor."""
    found = quantity.found
    if quantity.columns is None or not found.index:
        return found
    index = list(found.index)
    index[quantity.axis] = int(quantity.columns[index[quantity.axis]])
    if quantity.within:
        index = [int(place) for place in torch.unravel_index(torch.tensor(index[0]), quantity.within)]
    return replace(found, index=tuple(index))


def _limits(inputs: InputSet, quantity: Quantity, plain: Yardstick) -> Limits:
    """Limits with the resolution of the stored value. Special families have no CAP where plain autocast itself exceeds
    it: their inputs are outside of the range that autocast is made for."""
    limits = replace(quantity.limits, resolution=quantity.resolution)
    if limits.cap is None or not inputs.is_family:
        return limits
    return replace(limits, cap=None) if plain.rms > limits.cap * limits.row.unit * quantity.scale else limits


def _overflows(inputs: InputSet, quantity: Quantity) -> int:
    """Number of elements that float32 can hold and lower precision cannot, whatever plain autocast gives.

    0 on special families: a loss scale that falls would mend their gradients.
    """
    if inputs.is_family:
        return 0
    held = quantity.reference.abs() < torch.finfo(torch.float32).max
    return int((held & ~quantity.value.isfinite()).sum())


def _with_dtype(inputs: InputSet, quantity: Quantity, finding: Finding) -> Finding:
    """The finding with a note where a PRECISION candidate returns another dtype than plain autocast."""
    baseline, dtype = inputs.baseline.get(source(quantity.name)), quantity.value.dtype
    as_returned = quantity.name.startswith(("out/", "grad/"))
    if baseline is None or not as_returned or inputs.arithmetic.keeps_precision or baseline.dtype == dtype:
        return finding
    note = f"dtype {name_of(dtype)} where plain autocast has {name_of(baseline.dtype)}"
    return replace(finding, message="; ".join(filter(None, (finding.message, note))))


def unseen_for(inputs: InputSet, quantity: Quantity, finding: Finding) -> tuple[str, bool]:
    """Why a wrong value would have passed, and whether fp64 computes another program there (see
    `optexp.equivalence.sight`).

    Equal bits need no limit, though they tell of float64; and parts of a tensor are seen with the whole.
    """
    if finding.ok and lazy(quantity.name):
        return LAZY, False
    if not finding.ok or "G1" not in finding.allowed or is_part(quantity):
        return "", False
    if follows_zero(inputs, quantity.name):
        return "", False
    kind = quantity.name.partition("/")[0]
    unit, coarsest = quantity.limits.row.unit, inputs.traits.coarsest
    found, limit = finding.allowed["G1"]
    known = kind == "grad" and not finding.bitwise
    reason, parted = unseen(
        found=found,
        plain=inputs.plain(quantity).rms,
        limit=limit - quantity.resolution[0],
        spread=inputs.yardsticks.spread.get(quantity.name) if inputs.arithmetic.keeps_precision else None,
        scale=quantity.scale,
        terms=lambda: all_terms(inputs.fp64).get(quantity.name, 0.0) if known else 0.0,
        unit=unit,
        coarsest=coarsest,
    )
    return "" if finding.bitwise else reason, parted


def follows_zero(inputs: InputSet, name: str) -> bool:
    """Whether a quantity is the update of a parameter whose gradient is rounding alone."""
    kind, _, path = name.partition("/")
    return kind in ("change", "optimizer") and f"grad/{path.rpartition('/')[0] or path}" in inputs.fp64.results.zeros


def rows_far_off(inputs: InputSet, quantity: Quantity) -> tuple[int, int, int] | None:
    """Rows beyond CAP's limit in candidate and plain autocast, and all rows; None without a PRECISION contract."""
    plain = inputs.baseline.get(quantity.name)
    found = None if inputs.arithmetic.keeps_precision else far_off(quantity, plain)
    return None if found is None else found.to_tuple()


def baseline_at(inputs: InputSet, quantity: Quantity, index: tuple[int, ...]) -> Tensor | None:
    """The baseline's element at `index`, as a float64 scalar where fp64 runs; None where it is complex or missing.

    index: () of a scalar; of a larger tensor no element
    """
    name = quantity.name
    after, start = inputs.baseline.get(source(name)), inputs.baseline.get(source(name, "before"))
    if after is None or after.is_complex() or len(index) != after.ndim:
        return None
    value = after[index].to(torch.float64)
    return value - start[index] if name.startswith("change/") and start is not None else value
