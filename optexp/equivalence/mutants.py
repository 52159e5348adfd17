"""Small wrongs, made from the baseline's own results: gates that would let them pass prove nothing here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from optexp.equivalence.gates import Yardstick
from optexp.support.tolerances import SMALL, TOLERANCES, Tolerance

FIRST = 2**24  # elements: of larger tensors, mutants are made of so many
LARGE = 8.0  # times the yardstick: a mutant that is this far off must not pass


@dataclass(frozen=True)
class Subject:
    """One tensor of the baseline, and what its mutants are made of.

    value:     what the baseline got, widened to fp64;  scale: s;  yardstick: E;  row: of the arithmetic
    earlier:   what it got for the batch before
    without_eps: how far fp64 moves where every eps of the model is left out
    """

    kind: str  # out, grad, change, ...
    value: Tensor
    scale: float
    yardstick: Yardstick
    row: Tolerance
    earlier: Tensor | None = None
    without_eps: Tensor | None = None

    @property
    def smallest(self) -> float:
        """The yardstick, where it is more than rounding."""
        floor = self.row.peak_floor if self.value.numel() < SMALL else self.row.floor
        return max(self.yardstick.rms, floor * self.row.unit * self.scale)


def leading(tensor: Tensor) -> Tensor:
    """The first rows of a tensor that is too large to be copied several times; others as they are."""
    if tensor.numel() <= FIRST:
        return tensor
    rows = tensor.reshape(-1, tensor.shape[-1])
    return rows[: max(1, FIRST // rows.shape[-1]), :FIRST]


def scaled(s: Subject) -> Tensor:
    """By 1 + 8E/s."""
    return s.value * (1 + 8 * s.smallest / s.scale) if s.scale else s.value


def one_element_off(s: Subject) -> Tensor:
    """By 5 % of the tensor's size."""
    value = s.value.clone()
    value.view(-1)[value.numel() // 2] += 0.05 * s.scale
    return value


def tile_zeroed(s: Subject) -> Tensor | None:
    """A block of 16 × 16, or what there is of it."""
    if not s.value.dim():
        return None
    value = s.value.clone()
    value.view(-1, value.shape[-1])[:16, :16] = 0
    return value


def last_row_dropped(s: Subject) -> Tensor | None:
    if not s.value.dim():
        return None
    value = s.value.clone()
    value[-1] = 0
    return value


def one_column_dropped(s: Subject) -> Tensor | None:
    """The smallest along the last dimension is its mean: what is left of a head that is missing beside large ones."""
    if s.value.dim() < 2 or s.value.shape[-1] < 2:
        return None
    columns = s.value.view(-1, s.value.shape[-1])
    at = int(torch.linalg.vector_norm(columns, dim=0).nan_to_num(torch.inf).argmin())
    value = columns.clone()
    value[:, at] = columns[:, at].mean()
    return value.view(s.value.shape)


def stale(s: Subject) -> Tensor | None:
    """The result of the batch before."""
    return s.earlier


def not_cleared(s: Subject) -> Tensor | None:
    """Gradients on top of the earlier ones."""
    return None if s.earlier is None else s.value + s.earlier


def lower_precision(s: Subject) -> Tensor:
    """Rounded to the next-lower format: fp32, TF32, bfloat16, or 4 bits."""
    units = sorted({row.unit for row in TOLERANCES.values()} | {2.0**-4})
    unit = next(unit for unit in units if unit > s.row.unit)
    mantissa, exponent = torch.frexp(s.value)
    return torch.ldexp((mantissa / unit).round_().mul_(unit), exponent)


def without_eps(s: Subject) -> Tensor | None:
    return None if s.without_eps is None else s.value + s.without_eps


def rate_off_by_1_percent(s: Subject) -> Tensor:
    return s.value * 1.01


def no_update(s: Subject) -> Tensor:
    return torch.zeros_like(s.value)


NO_UPDATE = "no update"

Mutate = Callable[[Subject], Tensor | None]
_EVERYWHERE = (scaled, tile_zeroed, last_row_dropped, stale, lower_precision, without_eps)
MUTANTS: Mapping[str, tuple[Mutate, ...]] = {  # by kind of tensor
    "out": (*_EVERYWHERE, one_element_off, one_column_dropped),
    "grad": (*_EVERYWHERE, not_cleared),
    "change": (rate_off_by_1_percent, no_update),
}


@dataclass(frozen=True)
class Tried:
    """One mutant of one tensor beside the gates.

    caught:  a gate failed, or its structure differs;  gate: the one nearest to its limit
    off:     RMS change, over s; None where s is 0
    visible: see `optexp.records.verification.Finding`
    """

    tensor: str
    mutant: str
    caught: bool
    gate: str
    off: float | None
    visible: tuple[float, float] | None


def of(subject: Subject) -> Iterator[tuple[str, Tensor]]:
    """The mutants of a tensor, one at a time; where one would be no change at all, it is left out."""
    for function in MUTANTS.get(subject.kind, ()):
        value = function(subject)
        if value is not None and value.shape == subject.value.shape and not torch.equal(value, subject.value):
            yield function.__name__.replace("_", " "), value
