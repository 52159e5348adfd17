"""Limits of the gates by dtype (see docs/verification.md)."""

from __future__ import annotations

from dataclasses import dataclass

SMALL = 16  # elements: fewer show too little of an error's size, as one run may be right by luck
ZERO_UNITS, ZERO_MOST = 512.0, 0.002  # most that rounding leaves of a zero sum, over Σ|terms|: in u, and at most
SCARCE = 64  # elements of a gradient: in a smaller one, a few large errors dominate, and they differ from run to run


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

# For matrices that are quantized to int8 by their largest value. u is the error of one rounding (1/254 of the largest
# value) over half of that value. No tensor gets this row by its own dtype: integers are compared exactly.
INT8 = Tolerance(2**-7, 1.5, 3, 0.1, 3, 0.25)


def of_a_zero(unit: float) -> float:
    """Most that rounding may leave of a sum that is exactly zero, as a share of Σ|terms|.

    A running sum of 2^18 terms is off by about 512 u · Σ|terms|; compiled loops were observed to be off by 190 u.

    unit: u of the arithmetic
    """
    return min(ZERO_UNITS * unit, ZERO_MOST)


def tolerance_of(arithmetic: str) -> Tolerance:
    """The limits of an arithmetic: a dtype, "tf32" or "int8"."""
    return INT8 if arithmetic == "int8" else TOLERANCES[arithmetic]
