"""Why a tensor fails its gates: it is less exact than the baseline, or it is another result.

Rounding is small, has either sign, whatever the value that it falls on, and falls on all elements. A wrong result is
large, or follows the values, or lies in a few places. An optimizer's update is computed element by element from what an
arm has itself: nothing amplifies its rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import sqrt

import torch
from torch import Tensor

from optexp.equivalence.quantities import Quantity
from optexp.equivalence.tensor_math import chunks
from optexp.records.verification import Finding
from optexp.support.tolerances import SMALL
from optexp.support.units import ratio

MEASURED = ("G1", "G2", "G3", "CAP")  # gates of which an error is known
SURELY = 64.0  # u·s: an error so small is called rounding, whatever it looks like
MOST, MOST_UNITS = 0.02, 32.0  # of s, and of u·s; above both, and MOVED, nothing is called rounding
MOVED = 16.0  # times as far as rounding and other orders move the baseline's, as where large numbers cancel
LOWER = 0.0005  # of s: more than rounding in float32 leaves, and about what inputs rounded to TF32 do
SPREAD = 0.01  # of the elements at least, that hold the error (its participation ratio; Gaussian noise: a third)
FOLLOWS = 0.25  # of the square of the error, that the mean of elements with like values may hold
BINS, LOOKED_AT = 32, 2**20  # groups of elements with like values; elements that are sorted into them

ROUNDING, OTHER = "rounding", "another result"
OTHER_CHOICE = (
    "plain autocast is as far off, so it is no fault of the strategy: at this precision the program chooses otherwise"
    " (an argmax, a top-k, a comparison), or sums cancel"
)
ROUNDING_OR_NEAR = "as by rounding, or by a formula that is nearly the same (another eps, an approximation)"
LOWER_OR_OTHER = "as at a lower precision, or another result"
UPDATE = "as at a lower precision, or another update (a rate, a decay, a beta, an eps)"


@dataclass(frozen=True)
class Nature:
    """The pattern of an error.

    kind: ROUNDING, OTHER, or empty where nothing tells
    why:  of the others, in words
    """

    kind: str = ""
    why: str = ""


def explained(finding: Finding, quantity: Quantity, causes: Mapping[str, Tensor] | None = None) -> Finding:
    """The same finding; where a measured gate failed, its message says what the error looks like.

    causes: of an update, what it was computed from, by what people call it; None for other quantities
    """
    if finding.ok or finding.gate not in MEASURED or not quantity.scale:
        return finding
    if finding.failed == ("CAP",) and (finding.baseline_rms or 0.0) > finding.allowed["CAP"][1]:
        return replace(finding, message=f"{OTHER_CHOICE}; {finding.message}")
    unit, moved = quantity.limits.row.unit, finding.yardstick_rms or 0.0
    found = nature(quantity.value, quantity.reference, quantity.scale, unit, causes, moved)
    if found.kind == ROUNDING:
        ratios = {"G2": finding.max_ratio, "G3": finding.block_ratio}
        times = ratios.get(finding.gate, finding.error_ratio) or finding.error_ratio or 0.0
        coarse = unit < LOWER < quantity.found.rms / quantity.scale
        cause = LOWER_OR_OTHER if coarse else ROUNDING_OR_NEAR
        message = f"less exact than the baseline by {times:.3g}×: {cause}; {finding.message}"
    else:
        message = f"{finding.message}; {found.why}" if found.why else finding.message
    return replace(finding, nature=found.kind, message=message)


def nature(
    value: Tensor,
    reference: Tensor,
    scale: float,
    unit: float,
    causes: Mapping[str, Tensor] | None = None,
    moved: float = 0.0,
) -> Nature:
    """Of the error of `value`, whose reference has the size `scale`, in arithmetic with the unit roundoff `unit`.

    moved: how far rounding and other orders move the baseline's value
    """
    count = value.numel()
    size = sqrt(sum(float(error.square().sum()) for error, _ in _errors(value, reference)) / max(count, 1))
    if not size:
        return Nature()
    if size <= SURELY * unit * scale:
        return Nature(ROUNDING)
    if size > max(MOST * scale, MOST_UNITS * unit * scale, MOVED * moved):
        share = size / scale
        part = f"{share:.0%} of" if share < 1 else ratio(share)
        return Nature(OTHER, f"the error is {part} the tensor's size: more than any rounding")
    if count < SMALL:
        return Nature() if causes is None else Nature(why=UPDATE)
    for name, cause in (causes or {}).items():
        if (share := _proportional(value, reference, cause)) > FOLLOWS:
            return Nature(OTHER, f"{share:.0%} of the error is proportional to {name}: another update, not rounding")
    spread = _spread(value, reference, scale)
    if spread < SPREAD and spread * count < count - 1:
        return Nature(OTHER, f"the error lies in about {max(1, round(spread * count))} of {count} elements")
    if (share := _following(value, reference)) > FOLLOWS:
        return Nature(OTHER, f"{share:.0%} of the error follows the values: it is a systematic error, not rounding")
    for axis, share in _along(value, reference):
        if share > FOLLOWS:
            return Nature(OTHER, f"{share:.0%} of the error is the same along dimension {axis}: it is not rounding")
    return Nature(ROUNDING) if causes is None else Nature(why=UPDATE)


def _errors(value: Tensor, reference: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Pieces of the error and of the reference, in fp64; elements that are not finite in both have none."""
    for _, (c, g) in chunks(value, reference):
        wide = g.to(torch.float64)
        yield (c.to(torch.float64) - wide).nan_to_num(0.0, 0.0, 0.0), wide.nan_to_num(0.0, 0.0, 0.0)


def _spread(value: Tensor, reference: Tensor, scale: float) -> float:
    """Share of the elements that hold the error; one beside a large value counts by what it is of that."""
    squares = fourths = 0.0
    for error, wide in _errors(value, reference):
        square = (error * (scale / (wide.abs() + scale))).square()
        squares, fourths = squares + float(square.sum()), fourths + float(square.square().sum())
    return squares * squares / fourths / value.numel() if fourths else 0.0


def _following(value: Tensor, reference: Tensor) -> float:
    """Share of the error's square in its mean over elements with like values, beyond what chance leaves there."""
    left, parts = LOOKED_AT, list[tuple[Tensor, Tensor]]()
    for error, wide in _errors(value, reference):
        step = -(-value.numel() // LOOKED_AT)
        parts.append((error[::step][:left], wide[::step][:left]))
        left -= len(parts[-1][0])
    error, wide = (torch.cat(column) for column in zip(*parts, strict=True))
    bins = min(BINS, len(error) // SMALL)
    order = wide.argsort()
    return max((_share(error[some]) for some in (order, wide.abs().argsort())), default=0.0) if bins else _mean(error)


def _proportional(value: Tensor, reference: Tensor, cause: Tensor) -> float:
    """Share of the error's square that is a multiple of `cause`, beyond chance."""
    if cause.shape != value.shape or cause.is_complex() or value.is_complex():
        return 0.0
    product = squares = total = 0.0
    for (error, _), (_, (part,)) in zip(_errors(value, reference), chunks(cause), strict=True):
        wide = part.to(error)
        product += float((error * wide).sum())
        squares, total = squares + float(wide.square().sum()), total + float(error.square().sum())
    return product**2 / (squares * total) - 1 / value.numel() if squares * total > 0 else 0.0


def _mean(error: Tensor) -> float:
    total = float(error.square().sum())
    return max(0.0, float(error.mean() ** 2) * len(error) / total - 1 / len(error)) if total else 0.0


def _share(ordered: Tensor) -> float:
    """Of the square of errors, in the means of `BINS` groups of neighbours."""
    bins = min(BINS, len(ordered) // SMALL)
    groups = ordered[: len(ordered) // bins * bins].view(bins, -1)
    total = float(groups.square().sum())
    return float(groups.mean(1).square().sum()) * groups.shape[1] / total - bins / groups.numel() if total else 0.0


def _along(value: Tensor, reference: Tensor) -> Iterator[tuple[int, float]]:
    """For each dimension that means can be taken along: the share of the error's square in those, beyond chance."""
    if value.dim() < 2 or value.is_complex() or value.numel() > LOOKED_AT:
        return
    error = (value.to(torch.float64) - reference.to(torch.float64)).nan_to_num(0.0, 0.0, 0.0)
    total = float(error.square().sum())
    for axis in range(error.dim()):
        if (size := error.shape[axis]) >= SMALL and total:
            means = error.mean(axis)
            yield axis, float(means.square().sum()) * size / total - 1 / size
