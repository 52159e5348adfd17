"""The conditions that a candidate's tensors must meet, as functions over tensors.

No cosine: c = 2g scores 1 there. g is the fp64 reference, b the baseline, c the candidate, s = RMS(g), u the unit
roundoff of the arithmetic. Errors are measured in fp64 (see `optexp.equivalence.tensor_math`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf

import torch
from torch import Tensor

from optexp.equivalence.tensor_math import BLOCK, Error, chunks, identical, index_of, name_of
from optexp.records.verification import Element, Finding
from optexp.support.tolerances import SMALL as SMALL
from optexp.support.tolerances import TOLERANCES as TOLERANCES
from optexp.support.tolerances import Tolerance as Tolerance
from optexp.support.tolerances import of_a_zero

BLOCK_FACTOR = 4.0  # m of G3
GRADIENT_FACTOR = 2.0  # m = m∞ of gradients of many elements, whose yardstick already holds noisy runs
GROSS = 0.05  # of the size of elements that are far below the rest: a larger error is another result
PRECISION_CAP = 32.0  # RMS(c−g) ≤ 32·u·s on forward outputs, whatever plain autocast does


@dataclass(frozen=True)
class Yardstick:
    """Error of the baseline in one quantity: E (the largest RMS), E∞ (the largest peak), and the RMS of each block."""

    rms: float = 0.0
    peak: float = 0.0
    blocks: Tensor | None = field(default=None, compare=False, repr=False)

    @classmethod
    def of(cls, error: Error) -> Yardstick:
        return cls(error.rms, error.peak, error.blocks)

    def __or__(self, other: Yardstick) -> Yardstick:
        ours, theirs = self.blocks, other.blocks
        blocks = theirs if ours is None else ours
        if ours is not None and theirs is not None and ours.shape == theirs.shape:
            blocks = torch.maximum(ours, theirs)  # else of another batch, whose small columns are others
        return Yardstick(max(self.rms, other.rms), max(self.peak, other.peak), blocks)


def structure(
    candidate: Tensor, baseline: Tensor, *, any_dtype: bool = False, known_finite: bool = False
) -> str | None:
    """G0 for one tensor: the difference in shape, dtype or places of NaN and ±Inf, in words; None where there is none.

    known_finite: neither tensor has NaN or Inf
    """
    if candidate.shape != baseline.shape:
        return f"shape {list(candidate.shape)} instead of {list(baseline.shape)}"
    if candidate.dtype != baseline.dtype and not any_dtype:
        return f"dtype {name_of(candidate.dtype)} instead of {name_of(baseline.dtype)}"
    if known_finite or not (candidate.is_floating_point() or candidate.is_complex()):
        return None
    for start, (c, b) in chunks(candidate, baseline):
        same = (c.isnan() == b.isnan()) & (c.isposinf() == b.isposinf()) & (c.isneginf() == b.isneginf())
        if not bool(same.all()):
            at = int((~same).to(torch.uint8).argmax())
            values = f"is {float(c[at])} where the baseline has {float(b[at])}"
            return f"NaN and Inf differ: element {list(index_of(start + at, candidate))} {values}"
    return None


def exact(
    name: str, candidate: Tensor, baseline: Tensor, reference: Tensor | None, swayed: Sequence[Tensor] = ()
) -> Finding:
    """EXACT, for integers and bools: each element is the baseline's or, where an argmax was a tie in low precision,
    fp64's or that of a run of the baseline with noise.

    reference: of fp64; None where there is none;  swayed: results of noisy runs, of the same shape
    """
    for start, (c, b, g, *others) in chunks(candidate, baseline, baseline if reference is None else reference, *swayed):
        wrong = (c != b) & (c != g)
        for other in others:
            wrong &= c != other
        if bool(wrong.any()):
            at = int(wrong.to(torch.uint8).argmax())
            index = list(index_of(start + at, candidate))
            element = Element(index, c[at].item(), g[at].item(), b[at].item())
            message = f"element {index} is {c[at].item()} instead of {b[at].item()}; such values must be equal"
            return Finding(name, "EXACT", False, ("EXACT",), used=inf, element=element, message=message)
    return Finding(name, "EXACT", bitwise=identical(candidate, baseline))


@dataclass(frozen=True)
class Limits:
    """Constants of one tensor's limits.

    row:        of the arithmetic, or of the tensor's own coarser dtype
    few:        fewer than `SMALL` elements: their RMS has the floor of a single element
    scarce:     a gradient of fewer than `SCARCE` elements
    zero:       zero in exact arithmetic: all of it is rounding, of which a few runs say too little
    resolution: rounding of the stored value (RMS, largest)
    cap:        of RMS(c−g), in u·s; None for none
    gross:      only a result that is another one fails, by G1
    """

    row: Tolerance
    gradient: bool = False
    few: bool = False
    scarce: bool = False
    zero: bool = False
    resolution: tuple[float, float] = (0.0, 0.0)
    cap: float | None = None
    gross: bool = False


def measure(
    name: str, found: Error, scale: float, yardstick: Yardstick, baseline: Yardstick, limits: Limits
) -> Finding:
    """G1 to G3 (and CAP): the candidate's error beside the baseline's.

    found:     error of the candidate;  scale: s
    yardstick: E of the gates;  baseline: error of its plain runs, which the report's ratios refer to
    """
    row, (resolution, coarsest) = limits.row, limits.resolution
    known = limits.gradient and not limits.scarce
    warn, fail = factors(row, known)
    peak_fail = GRADIENT_FACTOR if known else row.peak_fail
    of_zero = of_a_zero(row.unit) if limits.zero else 0.0
    least = GROSS if limits.gross else (row.peak_floor if limits.few else row.floor) * row.unit
    floor = max(least, of_zero) * scale + resolution
    peak_floor = max(row.peak_floor * row.unit, BLOCK_FACTOR * of_zero)
    peak_limit = peak_fail * yardstick.peak + peak_floor * scale + coarsest
    allowed = {"G1": (found.rms, fail * yardstick.rms + floor)}
    if not limits.gross:
        allowed["G2"] = found.peak, peak_limit
    if limits.cap is not None:
        allowed["CAP"] = (found.rms, limits.cap * row.unit * scale)
    block, block_ratio = 0, None
    if found.blocks is not None and not limits.gross:
        block, error_there, expected = _worst_block(found.blocks, yardstick, floor)
        allowed["G3"] = (error_there, BLOCK_FACTOR * expected + floor)
        block_ratio = share(error_there, max(expected, row.unit * scale))
    used = {gate: share(value, limit) for gate, (value, limit) in allowed.items()}
    failed = tuple(gate for gate in used if used[gate] > 1.0)
    gate = failed[0] if failed else max(used, key=lambda name: used[name])
    one_rounding = row.unit * scale
    finding = Finding(
        name,
        gate,
        ok=not failed,
        failed=failed,
        weak=not failed and found.rms > warn * yardstick.rms + floor,
        error_rms=found.rms,
        baseline_rms=max(baseline.rms, one_rounding),
        yardstick_rms=yardstick.rms,
        error_ratio=share(found.rms, max(baseline.rms, one_rounding)),
        max_ratio=share(found.peak, max(yardstick.peak, one_rounding)),
        block_ratio=block_ratio,
        used=max(used.values()),
        allowed=allowed,
        scale=scale,
        resolution=resolution,
        visible=(allowed["G1"][1] / scale, peak_limit / scale) if scale else None,
        element=Element(list(found.index or ()), found.candidate, found.reference),
    )
    return replace(finding, message=_exceeded(finding, found, block)) if failed else finding


def _exceeded(finding: Finding, found: Error, block: int) -> str:
    """The limit that a finding exceeds, and the worst element, in words.

    block: index of the block that is nearest to its limit
    """
    gate, (value, limit) = finding.gate, finding.allowed[finding.gate]
    times = f"{value / limit:.3g} times" if limit else "above"
    what = "the error of the worst element" if gate == "G2" else "the RMS error"
    if gate == "G3":
        what += f" of elements {block * BLOCK} to {(block + 1) * BLOCK - 1}"
    where = f"element {list(found.index or ())} is {found.candidate:.9g} where fp64 gives {found.reference:.9g}"
    return f"{what} is {times} the limit of {limit:.3g}; {where}"


def factors(row: Tolerance, known: bool) -> tuple[float, float]:
    """m of G1: the larger error makes a result weak above the first, and fail above the second.

    known: noisy runs tell the error of a gradient of many elements
    """
    return (GRADIENT_FACTOR, GRADIENT_FACTOR) if known else (row.warn, row.fail)


def _worst_block(errors: Tensor, yardstick: Yardstick, floor: float) -> tuple[int, float, float]:
    """Index, error and E of the block that is nearest to its limit; E is never below the whole tensor's."""
    own = errors.new_zeros(()) if yardstick.blocks is None else yardstick.blocks[: len(errors)]  # of its first rows
    expected = own.clamp(min=yardstick.rms).expand_as(errors)
    at = (errors / (BLOCK_FACTOR * expected + floor)).nan_to_num(0.0, inf).argmax()
    where, value, there = torch.stack([at.to(errors), errors[at], expected[at]]).tolist()
    return int(where), value, there


def share(value: float, limit: float) -> float:
    """An error as a share of its limit; 0 for no error, infinite for an error without a limit."""
    if value == 0.0:
        return 0.0
    return value / limit if limit > 0.0 else inf
