"""Limits of the gates by dtype (see docs/verification.md)."""

from __future__ import annotations

from dataclasses import dataclass

SMALL = 16  # elements; fewer say too little about an error's size, and one run may be right by luck
ZERO_UNITS, ZERO_MOST = 512.0, 0.002  # of Σ|terms|, in u and at most: what rounding leaves of a sum that is zero
SCARCE = 64  # elements of a gradient; in fewer, a few large errors are most of it, and each run has others


@dataclass(frozen=True)
class Tolerance:
    """Limits of one dtype: G1 is RMS(c−g) ≤ m·E + κ·u·s, G2 is max |c−g|/(|g|+s) ≤ m∞·E∞ + κ∞·u.

    unit:      u, the largest relative error of one rounding
    warn:      m above which the verdict says "weaker"
    fail:      m
    floor:     κ
    peak_fail: m∞
    peak_floor: κ∞
    """

    unit: float
    warn: float
    fail: float
    floor: float
    peak_fail: float
    peak_floor: float


TOLERANCES = {
    "float64": Tolerance(2**-53, 2, 4, 4, 4, 16),
    "float32": Tolerance(2**-24, 2, 4, 4, 4, 16),
    "tf32": Tolerance(2**-11, 1.5, 3, 0.1, 3, 0.25),
    "float16": Tolerance(2**-11, 1.5, 3, 0.1, 3, 0.25),
    "bfloat16": Tolerance(2**-8, 1.5, 3, 0.1, 3, 0.25),
}

# Of matrices that are rounded by their largest value. u is the error of one rounding, 1/254 of the largest value,
# relative to half of that value. No tensor has this row by its own dtype: integers are compared exactly.
INT8 = Tolerance(2**-7, 1.5, 3, 0.1, 3, 0.25)


def of_a_zero(unit: float) -> float:
    """Share of Σ|terms| that rounding may leave of a sum that is zero in exact arithmetic, by the arithmetic's u.

    One running sum of 2^18 terms is off by some 512 u of them; compiled loops have been seen to be off by 190 u.
    """
    return min(ZERO_UNITS * unit, ZERO_MOST)


def tolerance_of(arithmetic: str) -> Tolerance:
    """The limits of an arithmetic: a dtype's, or int8's."""
    return INT8 if arithmetic == "int8" else TOLERANCES[arithmetic]
