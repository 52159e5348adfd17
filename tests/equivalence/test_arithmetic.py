"""The promised arithmetic gives each tensor its row of tolerances."""

from __future__ import annotations

import pytest
import torch

from optexp.equivalence.arithmetic import Arithmetic, is_low
from optexp.strategy import BITWISE, REASSOCIATES, precision
from optexp.support.tolerances import TOLERANCES


def test_a_contract_without_a_dtype_has_the_row_of_the_arms() -> None:
    for contract in (BITWISE, REASSOCIATES):
        found = Arithmetic.of(contract, torch.float64)
        assert (found.name, found.keeps_precision, found.as_exact_as_fp64) == ("float64", True, True)
        assert found.eps == torch.finfo(torch.float64).eps


def test_a_lower_precision_has_the_row_of_its_dtype() -> None:
    found = Arithmetic.of(precision("bfloat16"), torch.float32)
    assert (found.row, found.keeps_precision, found.as_exact_as_fp64) == (TOLERANCES["bfloat16"], False, False)


@pytest.mark.parametrize(("dtype", "row"), [("float32", "bfloat16"), ("bfloat16", "bfloat16"), ("int64", "bfloat16")])
def test_the_coarser_row_counts(dtype: str, row: str) -> None:
    tensor = torch.zeros(1, dtype=getattr(torch, dtype))
    assert Arithmetic.of(precision("bfloat16"), torch.float32).coarser_row(tensor) is TOLERANCES[row]


def test_a_dtype_without_a_row_has_the_arithmetics() -> None:
    found = Arithmetic.of(REASSOCIATES, torch.float32)
    assert found.row_of(torch.int64) is found.row
    assert found.row_of(torch.float16) is TOLERANCES["float16"]


def test_low_is_what_is_coarser_than_float32() -> None:
    assert [name for name, row in TOLERANCES.items() if is_low(row.unit)] == ["tf32", "float16", "bfloat16"]
