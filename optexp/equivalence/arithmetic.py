"""The arithmetic whose rounding a candidate is allowed: a row of tolerances for each tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from optexp.equivalence.tensor_math import name_of
from optexp.strategy import Contract
from optexp.support.tolerances import TOLERANCES, Tolerance, tolerance_of


@dataclass(frozen=True)
class Arithmetic:
    """The promised arithmetic of one comparison.

    name:            of its row of limits: the arms' dtype, or the dtype of a PRECISION contract
    eps:             machine epsilon of the arms' dtype
    keeps_precision: the contract is not PRECISION
    as_exact_as_fp64: the arms compute in float64, so the reference is no more exact than they are
    """

    name: str
    eps: float
    keeps_precision: bool
    as_exact_as_fp64: bool

    @classmethod
    def of(cls, contract: Contract, dtype: torch.dtype) -> Arithmetic:
        """The arithmetic that `contract` promises for arms whose parameters have `dtype`."""
        return cls(
            name=contract.dtype or name_of(dtype),
            eps=torch.finfo(dtype).eps,
            keeps_precision=contract.name != "PRECISION",
            as_exact_as_fp64=dtype is torch.float64,
        )

    @property
    def row(self) -> Tolerance:
        return tolerance_of(self.name)

    def row_of(self, dtype: torch.dtype) -> Tolerance:
        """The row of a dtype; of a dtype without a row, the arithmetic's."""
        return TOLERANCES.get(name_of(dtype), self.row)

    def coarser_row(self, tensor: Tensor) -> Tolerance:
        """The row with the larger unit roundoff: the arithmetic's, or that of the tensor's dtype."""
        return max(self.row, self.row_of(tensor.dtype), key=lambda row: row.unit)


def is_low(unit: float) -> bool:
    """Whether a unit roundoff exceeds float32's."""
    return unit > TOLERANCES["float32"].unit
