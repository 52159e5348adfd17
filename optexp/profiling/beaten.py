"""Ceilings of a CPU that a measurement beats: other programs slowed the calibration, so no bound may use them."""

from __future__ import annotations

from dataclasses import replace

from optexp.profiling.points import points
from optexp.profiling.work import amount
from optexp.records.profile import Calibration
from optexp.trace import Trace

OVER = 1.1  # over a ceiling: a GEMM of another size than the calibration's may reach this
COPIED_BYTES = 64 * 2**20  # moved by the calibration's copy; tensors of an operator that moves less may be in a cache
READ_ALONE = 2.0  # bandwidth of reading alone, over a copy's: a copy also reads its target before it overwrites it


def by_operators(ceilings: Calibration, trace: Trace) -> Calibration:
    """A CPU's ceilings, raised to the rates of traced operators; with a doubt where an operator beats them by far."""
    if ceilings.device != "cpu":
        return ceilings
    rate, doubt = ceilings.matrix.get("float32", 0.0), ceilings.doubt
    highest = rate
    for point in points(trace, ceilings):
        if point.rate and point.ceiling == rate and point.rate > highest:
            highest = point.rate
            if highest > OVER * rate:
                doubt = doubt or _beats(point.name, f"{amount(highest)}FLOP/s", f"{amount(rate)}FLOP/s")
        speed, copied = point.bandwidth or 0.0, ceilings.bandwidth
        if point.bytes > COPIED_BYTES * point.calls and speed > OVER * READ_ALONE * copied:
            doubt = doubt or _beats(point.name, f"{amount(speed)}B/s", f"{amount(copied)}B/s")
    matrix = {**ceilings.matrix, "float32": highest} if highest else ceilings.matrix
    return replace(ceilings, matrix=matrix, doubt=doubt)


def by_step(arm: str, step_us: float, bound_us: float) -> str:
    """The doubt that follows from a measured step shorter than its bound; else empty."""
    if step_us >= bound_us:
        return ""
    return f"the {arm}'s step is {bound_us / step_us:.2g} times faster than this machine's measured ceilings allow"


def together(earlier: Calibration | None, later: Calibration) -> Calibration:
    """The higher figures of a CPU's two calibrations, with the doubt of either; of a GPU's two, the later one."""
    if earlier is None or later.device != "cpu":
        return later
    names = {*earlier.matrix, *later.matrix}
    matrix = {name: max(earlier.matrix.get(name, 0.0), later.matrix.get(name, 0.0)) for name in sorted(names)}
    bandwidth = max(earlier.bandwidth, later.bandwidth)
    return replace(later, bandwidth=bandwidth, matrix=matrix, doubt=earlier.doubt or later.doubt)


def _beats(operator: str, reached: str, ceiling: str) -> str:
    return f"{operator} reached {reached} where {ceiling} was measured as this machine's ceiling"
