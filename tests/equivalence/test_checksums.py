"""A checksum stands for the bits of a tensor and their places."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from optexp.equivalence import checksums
from optexp.equivalence.checksums import checksum, compact
from optexp.equivalence.tensor_math import alike

SIZE = 2**19 + 5  # more than one piece, and no multiple of eight bytes


def swapped(x: Tensor) -> Tensor:
    x[3], x[SIZE - 4] = x[SIZE - 4].clone(), x[3].clone()
    return x


def last_bit(x: Tensor) -> Tensor:
    x.view(torch.uint8)[-1] ^= 1
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int8, torch.bool])
def test_equal_contents_have_equal_checksums(dtype: torch.dtype) -> None:
    x = torch.randn(SIZE).to(dtype)
    assert checksum(x) == checksum(x.clone())
    assert checksum(torch.stack([x, x], 1)[:, 0]) == checksum(x)  # however they are laid out
    assert checksum(torch.cat([x[:1], x])[1:]) == checksum(x)  # and wherever they begin


@pytest.mark.parametrize("change", [swapped, last_bit, torch.neg, lambda x: x.roll(1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_contents_have_others(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(SIZE).to(dtype)
    assert checksum(change(x.clone())) != checksum(x)


def test_zeros_of_different_signs_and_nans_are_told_apart() -> None:
    assert checksum(torch.zeros(9)) != checksum(-torch.zeros(9))
    assert checksum(torch.full((9,), torch.nan)) == checksum(torch.full((9,), torch.nan))


@pytest.mark.parametrize("large", [0, 2**26])
def test_compact_tensors_are_alike_where_the_tensors_are(large: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checksums, "LARGE", large)
    x = torch.randn(6, 8)
    others = {"same": x.clone(), "shape": x.view(8, 6), "dtype": x.view(torch.int32), "value": x + 1, "copy": x}
    ours = compact(dict.fromkeys(others, x), copy=True)
    assert alike(ours, compact(others)) == {"same", "copy"}
    x.zero_()
    assert alike(ours, compact(others)) == {"same"}
