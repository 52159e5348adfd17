"""Lower bounds of a step's time: from its trace, without one kind of waiting, and from physics alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optexp.measurement.floor import MARGIN, float32_rate
from optexp.profiling.breakdown import Breakdown
from optexp.profiling.work import amount
from optexp.records.profile import Calibration
from optexp.records.roofline import PhysicalBound, StepWork

ON_CPU = 0.5  # in place of MARGIN: a CPU's copy also reads its target, so the calibrated bandwidth is too low
SIZES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
EIGHT_BITS = 2  # 8-bit numbers, at twice the rate and half the size, may stay within bfloat16's limits
NOTHING_CERTAIN = "no more of its bytes is certain to be needed than the caches hold, and none of its GEMMs is"
SHORT_SUMS = 2  # some cards accumulate float16 GEMMs in float16, at twice the rate


@dataclass(frozen=True)
class Bound:
    """A lower bound of a step's time, in µs.

    text:      the assumption, in words
    device_us: the device's part of `us`; 0 on a CPU; None where unknown: bounds of a stack cannot be combined then
    least_us:  host time that the step needs in any case
    """

    text: str
    us: float
    device_us: float | None = None
    least_us: float = 0.0


def bounds(breakdown: Breakdown) -> list[Bound]:
    """Bounds of a step on a GPU, the loosest first; empty on a CPU, whose traces mix work and waiting."""
    if breakdown.busy is None:
        return []
    whole, terms = breakdown.wall_us, breakdown.terms
    kernels = breakdown.kernel_share
    bounds_ = [
        Bound("the host is never late", whole * (1 - breakdown.host_late)),
        Bound("copies are hidden behind kernels", whole * (1 - terms["exposed_copies"])),
        Bound("the GPU is never idle", whole * breakdown.busy),
        Bound("nothing but the kernels as they are", whole * kernels),
    ]
    return sorted((bound for bound in bounds_ if bound.us < 0.995 * whole), key=lambda bound: -bound.us)


def physical(work: StepWork, calibration: Calibration, given: str, promised: str | None = None) -> PhysicalBound:
    """The least time of any honest program for this step, by this device's measured ceilings.

    The bound prefers safety to tightness:
    - Only necessary work counts (see `optexp.profiling.necessary_work`).
    - Bytes that fit in the caches do not count, as caches may keep them from step to step.
    - State and results are stored in the narrowest numbers, and flops run at the fastest rate, that the promise allows.
    - A margin is taken off, as a good run beats the measured ceilings.
    - Memory traffic and the arithmetic of each dtype may overlap: the longest counts, not the sum.

    Args:
        given: The program's own dtype.
        promised: The dtype whose limits the results must meet, if it differs from `given` ("tf32" too).
    """
    if work.reason:
        return PhysicalBound(reason=work.reason)
    on_cpu = calibration.device == "cpu"
    margin = ON_CPU if on_cpu else MARGIN
    narrower = min(SIZES.get(promised or given, 4) / SIZES.get(given, 4), 1.0)
    narrower /= EIGHT_BITS if "bfloat16" in (given, promised) else 1
    moved = max(0.0, work.input_bytes + work.kept_bytes * narrower - work.cache_bytes)
    memory = margin * moved / calibration.bandwidth
    times = [
        (margin * count / rate, dtype, rate)
        for dtype, count in work.flops.items()
        if (rate := fastest(dtype, calibration.matrix, promised, on_cpu))
    ]
    compute, dtype, rate = max(times, default=(0.0, "", 0.0))
    if not moved and not compute:
        return PhysicalBound(reason=NOTHING_CERTAIN)
    parts = [
        f"{margin:g} · ({amount(work.input_bytes)}B of inputs + {amount(work.kept_bytes * narrower)}B of state and"
        f" results − {amount(work.cache_bytes)}B of cache) / {amount(calibration.bandwidth)}B/s"
    ]
    if compute:
        parts.append(f"{margin:g} · {amount(work.flops[dtype])}FLOP / {amount(rate)}FLOP/s ({dtype})")
    both = sorted(zip((memory, compute), parts, strict=False), reverse=True)
    return PhysicalBound(both[0][0] * 1e6, memory * 1e6, compute * 1e6, both[0][1])


def fastest(dtype: str, rates: Mapping[str, float], promised: str | None, on_cpu: bool) -> float:
    """The highest flop/s of a dtype's GEMMs that a promise allows; 0 where it is not known."""
    if on_cpu:  # the calibration's 16-bit GEMM is too small to give a ceiling
        return rates.get("float32", 0.0) if dtype in ("float32", "tf32") and promised in (None, "tf32") else 0.0
    own = {"float32": float32_rate(rates), "tf32": max(float32_rate(rates), rates.get("tf32", 0.0))}
    known = own.get(dtype, rates.get(dtype, 0.0))
    if promised and not rates.get(promised):
        return 0.0
    rate = max(known, rates.get(promised or "", 0.0)) if known else 0.0
    return rate * max(
        EIGHT_BITS if "bfloat16" in (dtype, promised) else 1, SHORT_SUMS if "float16" in (dtype, promised) else 1
    )
