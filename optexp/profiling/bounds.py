"""Lower bounds of a step's time: from its own trace, if one kind of waiting were gone, and from physics alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from optexp.measurement.floor import MARGIN, float32_rate
from optexp.profiling.breakdown import Breakdown
from optexp.profiling.work import amount
from optexp.records.profile import Calibration
from optexp.records.roofline import PhysicalBound, StepWork

ON_CPU = 0.5  # instead of MARGIN: a copy there reads its target, too
SIZES = {"float64": 8, "float32": 4, "tf32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
EIGHT_BITS = 2  # of bfloat16's limits: 8-bit numbers keep them at times, at twice the rate and half the size
SHORT_SUMS = 2  # some cards sum products of float16 in float16, at twice the rate


@dataclass(frozen=True)
class Bound:
    """A lower bound of a step's time, in µs.

    text:      the assumption, in words
    device_us: of it, work of the device; 0 on a CPU; None where that is not told, so that no stack can count on it
    least_us:  of the host, in any case
    """

    text: str
    us: float
    device_us: float | None = None
    least_us: float = 0.0


def bounds(breakdown: Breakdown) -> list[Bound]:
    """Bounds of a step on a GPU, the loosest first; empty on a CPU, where work and waiting are not told apart."""
    if breakdown.busy is None:
        return []
    whole, terms = breakdown.wall_us, breakdown.terms
    kernels = breakdown.kernel_share
    found = [
        Bound("the host is never late", whole * (1 - breakdown.host_late)),
        Bound("copies are hidden behind kernels", whole * (1 - terms["exposed_copies"])),
        Bound("the GPU is never idle", whole * breakdown.busy),
        Bound("nothing but the kernels as they are", whole * kernels),
    ]
    return sorted((bound for bound in found if bound.us < 0.995 * whole), key=lambda bound: -bound.us)


def physical(work: StepWork, calibration: Calibration, given: str, promised: str | None = None) -> PhysicalBound:
    """The time that no honest program needs less of, by this device's measured ceilings.

    A true bound rather than a close one: the step's own work counts only as far as it cannot be left out (see
    `optexp.profiling.necessary_work`); bytes only beyond the caches, which may keep some from step to step; state and
    results in the narrowest numbers that the promise allows; flops at the fastest rate that it allows; the ceilings
    are measured and are beaten on a good day, so that a margin is taken off. Memory and arithmetic may overlap, and
    so may arithmetic of several dtypes: the longest of them counts, not their sum.

    Args:
        given: The program's own dtype.
        promised: The dtype by whose limits results are judged, where it is another ("tf32" too).
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
        return PhysicalBound(reason="all its bytes fit in the caches, and none of its GEMMs is certain to be needed")
    parts = [
        f"{margin:g} · ({amount(work.input_bytes)}B of inputs + {amount(work.kept_bytes * narrower)}B of state and"
        f" results − {amount(work.cache_bytes)}B of cache) / {amount(calibration.bandwidth)}B/s"
    ]
    if compute:
        parts.append(f"{margin:g} · {amount(work.flops[dtype])}FLOP / {amount(rate)}FLOP/s ({dtype})")
    both = sorted(zip((memory, compute), parts, strict=False), reverse=True)
    return PhysicalBound(both[0][0] * 1e6, memory * 1e6, compute * 1e6, both[0][1])


def fastest(dtype: str, rates: Mapping[str, float], promised: str | None, on_cpu: bool) -> float:
    """The highest flop/s at which products of a dtype may be computed under a promise; 0 where it is not known."""
    if on_cpu:  # 16 bits are calibrated by a product too small to be a ceiling
        return rates.get("float32", 0.0) if dtype in ("float32", "tf32") and promised in (None, "tf32") else 0.0
    own = {"float32": float32_rate(rates), "tf32": max(float32_rate(rates), rates.get("tf32", 0.0))}
    known = own.get(dtype, rates.get(dtype, 0.0))
    if promised and not rates.get(promised):
        return 0.0
    rate = max(known, rates.get(promised or "", 0.0)) if known else 0.0
    return rate * max(
        EIGHT_BITS if "bfloat16" in (dtype, promised) else 1, SHORT_SUMS if "float16" in (dtype, promised) else 1
    )
