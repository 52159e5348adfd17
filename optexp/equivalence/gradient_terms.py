"""Gradients beside the sums of their terms: one that cancels to nothing is rounding, whatever its bits."""

from __future__ import annotations

from collections.abc import Mapping

from optexp.equivalence.cancellation import LEFT, Terms
from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.equivalence.tensor_math import rms
from optexp.errors import NoReference

ZERO = 2.0**-40  # of its terms: a sum in float64 of which no more is left is zero in exact arithmetic
SUSPECT = 1e-9  # of the largest gradient: one that may be


def zeros(fp64: Fp64Reference) -> Mapping[str, float]:
    """RMS over elements of Σ|terms| of each gradient of the set's first step that is zero in exact arithmetic."""
    if fp64.results.zeros is None:
        fp64.results.zeros = _zeros(fp64)
    return fp64.results.zeros


def _zeros(fp64: Fp64Reference) -> dict[str, float]:
    golden = fp64.step(0, fp64.initial)
    found = {name: rms(tensor) for name, tensor in golden.items() if name.startswith("grad/")}
    least = SUSPECT * max(found.values(), default=0.0)
    suspects = [name for name, size in found.items() if size < least]
    sizes = _sums(fp64, LEFT) if suspects else {}
    return {name: size for name, size in sizes.items() if name in suspects and size * ZERO > found[name]}


def all_terms(fp64: Fp64Reference) -> Mapping[str, float]:
    """RMS over elements of Σ|terms| of every gradient of the set's first step, by name."""
    if fp64.results.terms is None:
        fp64.results.terms = _sums(fp64, least=1.0)
    return fp64.results.terms


def _sums(fp64: Fp64Reference, least: float) -> dict[str, float]:
    """RMS over elements of Σ|terms| of each gradient of the first step that is smaller than a share of its terms.

    least: the share
    """
    try:
        with fp64.aside(), Terms(least) as terms:
            fp64.step(0, dict(fp64.initial))
        return {
            f"grad/{alias.name}": terms.of(parameter.grad)
            for alias, parameter in fp64.program.parameters()
            if parameter.grad is not None and terms.of(parameter.grad)
        }
    except (NoReference, RuntimeError):  # code that does not run inside a dispatch mode
        return {}
