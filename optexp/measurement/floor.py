"""Least time of an operation: its bytes must be moved, and its multiplications must be computed."""

from __future__ import annotations

from collections.abc import Mapping

from optexp.records.profile import Calibration

MARGIN = 0.9  # a good run beats the measured ceilings by up to a tenth
PRODUCTS = 3  # GEMMs in TF32 that are as exact as one in float32 (operands split into a high and a low part)


def floor_s(
    moved: int, cached: int, flops: float | None, calibration: Calibration, dtype: str, narrower: float = 1.0
) -> float:
    """Least seconds of a step.

    moved:     bytes of unique inputs, outputs and parameters
    cached:    bytes of these that the L2 cache may hold
    dtype:     of the arithmetic, as calibrated ("tf32" too)
    narrower:  size of that dtype's values over that of the parameters, which may be kept converted
    """
    memory = max(0.0, moved * narrower - cached) / calibration.bandwidth
    rates = calibration.matrix
    rate = float32_rate(rates) if dtype == "float32" else rates.get(dtype)
    return float(MARGIN * max(memory, flops / rate if flops and rate else 0.0))


def float32_rate(rates: Mapping[str, float]) -> float:
    """The higher flop/s of GEMMs as exact as float32: in float32, or in several TF32 GEMMs; 0 without a calibration."""
    return max(rates.get("float32", 0.0), rates.get("tf32", 0.0) / PRODUCTS)
