"""Gradients beside the sums of their terms: one that cancels to nothing is rounding, whatever its bits."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from optexp.equivalence.cancellation import LEFT, Terms
from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.observation import Observation
from optexp.equivalence.tensor_math import rms
from optexp.errors import NoReference

ZERO = 2.0**-40  # of its terms: a sum in float64 of which no more is left is zero in exact arithmetic
SUSPECT = 1e-9  # of the largest gradient: one that may be


def zeros(fp64: Fp64Reference) -> Mapping[str, float]:
    """RMS over elements of Σ|terms| of gradients of the set's first step that are zero in exact arithmetic, by name."""
    note_zeros(fp64, 0, fp64.initial, fp64.step(0, fp64.initial))
    return fp64.results.zeros


def note_zeros(fp64: Fp64Reference, index: int, state: Mapping[str, Tensor], golden: Observation) -> None:
    """Find zeros among gradients that no step of the set had before: a generator may learn in every fifth step.

    index, state: of the step;  golden: its results
    """
    found = fp64.results
    new = [name for name in golden if name.startswith("grad/") and name not in found.looked_at]
    if not new:
        return
    found.looked_at.update(new)
    sizes = {name: rms(tensor) for name, tensor in golden.items() if name.startswith("grad/")}
    least = SUSPECT * max(sizes.values())
    if suspects := [name for name in new if sizes[name] < least]:
        terms = _sums(fp64, LEFT, index, state)
        found.zeros |= {name: terms[name] for name in suspects if terms.get(name, 0.0) * ZERO > sizes[name]}


def all_terms(fp64: Fp64Reference) -> Mapping[str, float]:
    """RMS over elements of Σ|terms| of every gradient of the set's first step, by name."""
    if fp64.results.terms is None:
        fp64.results.terms = _sums(fp64, 1.0, 0, fp64.initial)
    return fp64.results.terms


def _sums(fp64: Fp64Reference, least: float, index: int, state: Mapping[str, Tensor]) -> dict[str, float]:
    """RMS over elements of Σ|terms| of each gradient of a step that is smaller than a share of its terms.

    least: the share
    """
    try:
        with fp64.aside(), Terms(least) as terms:
            fp64.step(index, dict(state))
        return {
            f"grad/{alias.name}": terms.of(parameter.grad)
            for alias, parameter in fp64.program.parameters()
            if parameter.grad is not None and terms.of(parameter.grad)
        }
    except (NoReference, RuntimeError):  # code that does not run inside a dispatch mode
        return {}
