"""Rows that lower precision moved by far more than rounding: another expert was chosen, or another index of a top-k."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optexp.equivalence.gates import PRECISION_CAP
from optexp.equivalence.quantities import Quantity, is_exact, is_part
from optexp.equivalence.tensor_math import CHUNK
from optexp.support.tolerances import SMALL


@dataclass(frozen=True)
class FarOff:
    """Rows of one result, or elements where it has no rows.

    candidate, plain: how many are off in the candidate, and in plain autocast
    rows:             how many there are
    """

    candidate: int
    plain: int
    rows: int

    def __add__(self, other: FarOff) -> FarOff:
        return FarOff(self.candidate + other.candidate, self.plain + other.plain, self.rows + other.rows)

    def to_tuple(self) -> tuple[int, int, int]:
        return self.candidate, self.plain, self.rows


def far_off(quantity: Quantity, plain: Tensor | None) -> FarOff | None:
    """Of a result at lower precision; None of anything else.

    plain: what plain autocast got
    """
    name, reference = quantity.name, quantity.reference
    if not name.startswith("out/") or is_part(quantity) or reference.numel() < SMALL:
        return None
    if plain is None or plain.shape != quantity.value.shape or quantity.value.is_complex():
        return None
    limit = 0.0 if is_exact(reference) else PRECISION_CAP * quantity.limits.row.unit * quantity.scale
    candidate, theirs = (_rows(tensor, reference, limit) for tensor in (quantity.value, plain))
    return FarOff(candidate, theirs, reference.numel() // _width(reference))


def _width(reference: Tensor) -> int:
    return reference.shape[-1] if reference.dim() > 1 and not is_exact(reference) else 1


def _rows(value: Tensor, reference: Tensor, limit: float) -> int:
    """How many have an RMS error above the limit; integers, how many are others."""
    width, found = _width(reference), 0
    ours, theirs = value.reshape(-1, width), reference.reshape(-1, width)
    step = max(1, CHUNK // width)
    for start in range(0, len(ours), step):
        c, g = (rows[start : start + step].to(torch.float64) for rows in (ours, theirs))
        off = (c - g).nan_to_num(0.0, 0.0, 0.0).square_().mean(1).sqrt_()
        found += int((off > limit).sum())
    return found
