"""Batches are told apart by digests; large ones are not copied to the host for it."""

from __future__ import annotations

import pytest
import torch

from optexp.equivalence.tensor_math import FETCHED
from optexp.workers import arm_timing
from optexp.workers.arm_timing import digest_of


@pytest.mark.parametrize("largest", [16, 2**26], ids=["large", "small"])
def test_equal_batches_have_equal_digests_and_others_do_not(largest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_timing, "LARGE", largest)
    values = torch.randn(64, 8)
    swapped, changed = values.clone(), values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    changed[63, 7] = torch.nextafter(changed[63, 7], torch.tensor(9.0))
    digests = [digest_of((tensor,)) for tensor in (values, values.clone(), swapped, changed, values.half())]
    assert digests[0] == digests[1]
    assert len(set(digests)) == 4
    assert digest_of({"a": values}) != digest_of({"b": values})


@pytest.mark.gpu
def test_a_batch_of_a_mebibyte_stays_on_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = torch.randn(2**20, device="cuda")
    digest = digest_of((batch,))
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: pytest.fail(f"copies {tensor.nbytes} bytes"))
    assert digest_of((batch.clone(),)) == digest != digest_of((batch.flip(0),))


def test_a_large_batch_stays_where_it_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_timing, "LARGE", 16)
    large, small = torch.randn(FETCHED + 1), torch.randn(2)
    copied: list[int] = []
    original = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: copied.append(tensor.nbytes) or original(tensor))
    digest_of((large, small))
    assert copied == [small.nbytes]
