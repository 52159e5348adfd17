"""Ceilings of a CPU that something beats: they were measured beside other programs, and no bound follows from them."""

from __future__ import annotations

from dataclasses import replace

from optexp.profiling.points import points
from optexp.profiling.work import amount
from optexp.records.profile import Calibration
from optexp.trace import Trace

OVER = 1.1  # of a ceiling: what a smaller or larger product than the calibration's may reach
COPIED_BYTES = 64 * 2**20  # by the calibration's copy: an operator that moves less may find its tensors in a cache
READ_ALONE = 2.0  # times a copy's bandwidth: a copy also reads what it overwrites


def by_operators(ceilings: Calibration, trace: Trace) -> Calibration:
    """A CPU's ceilings, no lower than what a traced operator reached; with a doubt where one is far above them."""
    if ceilings.device != "cpu":
        return ceilings
    rate, doubt = ceilings.matrix.get("float32", 0.0), ceilings.doubt
    highest = rate
    for found in points(trace, ceilings):
        if found.rate and found.ceiling == rate and found.rate > highest:
            highest = found.rate
            if highest > OVER * rate:
                doubt = doubt or _beats(found.name, f"{amount(highest)}FLOP/s", f"{amount(rate)}FLOP/s")
        speed, copied = found.bandwidth or 0.0, ceilings.bandwidth
        if found.bytes > COPIED_BYTES * found.calls and speed > OVER * READ_ALONE * copied:
            doubt = doubt or _beats(found.name, f"{amount(speed)}B/s", f"{amount(copied)}B/s")
    matrix = {**ceilings.matrix, "float32": highest} if highest else ceilings.matrix
    return replace(ceilings, matrix=matrix, doubt=doubt)


def by_step(arm: str, step_us: float, bound_us: float) -> str:
    """The doubt where a measured step is shorter than the bound; else empty."""
    if step_us >= bound_us:
        return ""
    return f"the {arm}'s step is {bound_us / step_us:.2g} times faster than this machine's measured ceilings allow"


def together(earlier: Calibration | None, later: Calibration) -> Calibration:
    """The highest figures of a CPU's two calibrations; a doubt stays. A GPU's later one."""
    if earlier is None or later.device != "cpu":
        return later
    names = {*earlier.matrix, *later.matrix}
    matrix = {name: max(earlier.matrix.get(name, 0.0), later.matrix.get(name, 0.0)) for name in sorted(names)}
    bandwidth = max(earlier.bandwidth, later.bandwidth)
    return replace(later, bandwidth=bandwidth, matrix=matrix, doubt=earlier.doubt or later.doubt)


def _beats(operator: str, reached: str, ceiling: str) -> str:
    return f"{operator} reached {reached} where {ceiling} was measured as this machine's ceiling"
