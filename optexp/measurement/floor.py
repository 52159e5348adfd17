"""The time that no program can beat: an operation's bytes must move, and its multiplications must be done."""

from __future__ import annotations

from collections.abc import Mapping

from optexp.records.profile import Calibration

MARGIN = 0.9  # ceilings are measured, and a good day beats them by a little
PRODUCTS = 3  # of TF32, of what it keeps and leaves of both operands, that are as exact as one of float32


def floor_s(
    moved: int, cached: int, flops: float | None, calibration: Calibration, dtype: str, narrower: float = 1.0
) -> float:
    """Seconds of a step, at least.

    moved:     bytes of unique inputs, outputs and parameters
    cached:    bytes of them that the L2 cache may hold
    dtype:     of the arithmetic, as calibrated ("tf32" too)
    narrower:  size of that dtype's values over that of the parameters, which may be kept converted
    """
    memory = max(0.0, moved * narrower - cached) / calibration.bandwidth
    rates = calibration.matrix
    rate = float32_rate(rates) if dtype == "float32" else rates.get(dtype)
    return float(MARGIN * max(memory, flops / rate if flops and rate else 0.0))


def float32_rate(rates: Mapping[str, float]) -> float:
    """Flop/s of products that are as exact as float32's: its own, or those of TF32 in its place; 0 where neither was
    calibrated."""
    return max(rates.get("float32", 0.0), rates.get("tf32", 0.0) / PRODUCTS)
