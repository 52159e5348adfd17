"""Sizes, errors and bits of tensors: the same in chunks, of many at a time, and on either device."""

from __future__ import annotations

import math

import pytest
import torch

from optexp.equivalence import tensor_math
from optexp.equivalence.checksums import checksum
from optexp.equivalence.tensor_math import Error, alike, error, identical

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


MASK = torch.rand(61, 61, generator=torch.Generator().manual_seed(2)) < 0.5


def spread(scale=1.0):
    return scale * torch.randn(61, 61, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


@pytest.fixture
def reference():
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_error_names_the_worst_element(reference):
    candidate = reference.clone()
    candidate[3, 4] += 2.0
    found = error(candidate, reference, scale=1.0)
    assert found.index == (3, 4)
    assert found.rms == pytest.approx(2.0 / 256)
    assert found.peak == pytest.approx(2.0 / (1 + abs(reference[3, 4].item())))
    assert (found.candidate, found.reference) == (candidate[3, 4].item(), reference[3, 4].item())


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_chunks_do_not_change_an_error(monkeypatch, reference, chunk):
    reference = reference[:8, :9].T
    candidate = reference.float() * 1.001
    whole = error(candidate, reference, 1.0)
    monkeypatch.setattr(tensor_math, "CHUNK", chunk)
    parts = error(candidate, reference, 1.0)
    assert parts.index == whole.index
    assert parts.rms == pytest.approx(whole.rms, rel=1e-12)
    assert tensor_math.rms(reference) == pytest.approx(reference.square().mean().sqrt().item(), rel=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_many_tensors_are_looked_at_as_each_by_itself(monkeypatch, rows, device):
    shapes = [(), (0,), (3, 5), (tensor_math.BLOCK,), (2, tensor_math.BLOCK), (5, 1000), (1,)]
    ours = [torch.randn(shape, device=device) for shape in shapes]
    ours[2][1, 1], ours[4][1, 7] = torch.nan, torch.inf
    theirs = [tensor.double() + 0.1 * torch.randn(tensor.shape, device=device) for tensor in ours]
    scales = [1.0, 1.0, 0.0, 2.0, 0.5, 1.0, 0.0]
    monkeypatch.setattr(tensor_math, "CHUNK", rows * tensor_math.BLOCK)
    for c, g, s, found in zip(
        ours, theirs, scales, tensor_math.errors([*zip(ours, theirs, scales, strict=True)]), strict=True
    ):
        off = (c.double() - g).abs()
        off[~off.isfinite()] = 0
        known = max(1, int((c.double() - g).isfinite().sum()))
        weighted = (off * (s / (g.abs() + s) if s else 1.0)).nan_to_num(0)
        assert found.rms == pytest.approx((off.square().sum() / known).sqrt().item(), rel=1e-12)
        assert found.peak == pytest.approx(weighted.max().item() if c.numel() else 0.0, rel=1e-12)
        assert found.index is None or weighted[found.index] == weighted.max()
        assert (found.blocks is None) == (c.numel() <= tensor_math.BLOCK)
        if found.blocks is not None:
            squares = torch.nn.functional.pad(off.flatten().square(), (0, -c.numel() % tensor_math.BLOCK))
            assert torch.allclose(found.blocks, squares.cpu().view(-1, tensor_math.BLOCK).mean(1).sqrt())
    assert tensor_math.sizes(ours) == pytest.approx([tensor_math.rms(tensor) for tensor in ours], rel=1e-12)
    assert tensor_math.peaks(ours) == [tensor_math.largest(tensor) for tensor in ours]
    assert tensor_math.finite(dict(enumerate(ours))) == {0, 1, 3, 5, 6}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_that_is_not_finite_is_found_wherever_it_is(device: str, dtype: torch.dtype):
    tensors = {"all": torch.ones(300_001, dtype=dtype, device=device)}
    for value in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 65_535, 65_536, 200_000, 300_000):
            tensors[f"{value} at {place}"] = tensors["all"].clone()
            tensors[f"{value} at {place}"][place] = value
    assert tensor_math.finite(tensors) == {"all"}
    assert tensor_math.finite({}) == set()
    assert tensor_math.sizes([torch.empty(0, dtype=dtype, device=device)]) == [0.0]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("chunk", [tensor_math.CHUNK, 1000])
def test_alike_are_those_that_are_identical(device: str, chunk: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_math, "CHUNK", chunk)  # a larger tensor is looked at by itself
    ours = {"nan": torch.tensor([torch.nan]), "zero": torch.zeros(2), "long": torch.arange(9999), "gaps": torch.eye(3)}
    ours = {name: tensor.to(device) for name, tensor in ours.items()}
    theirs = {name: tensor.clone() for name, tensor in ours.items()} | {"other": torch.ones(1)}
    ours["gaps"], theirs["gaps"] = ours["gaps"][:, 1], theirs["gaps"][:, 1]
    assert tensor_math.alike(ours, theirs) == ours.keys()
    theirs["zero"][1] = -0.0
    theirs["long"][9998] = 0
    theirs["nan"] = theirs["nan"].double()
    assert tensor_math.alike(ours, theirs) == {"gaps"}
    assert tensor_math.alike({}, theirs) == set()


def test_error_of_nothing_of_scalars_and_of_complex_numbers():
    assert error(torch.empty(0), torch.empty(0), 0.0) == Error()
    assert error(torch.tensor(1.5), torch.tensor(1.0), 1.0).index == ()
    found = error(torch.tensor([1 + 2j]), torch.tensor([1 + 1j]), 1.0)
    assert found.index == (0, 1)  # the imaginary part of the first
    assert error(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]), 1.0).rms == 0.0
    beside_nan = error(torch.tensor([torch.inf, 1.5, torch.nan]), torch.tensor([torch.inf, 1.0, torch.nan]), 1.0)
    assert (beside_nan.rms, beside_nan.peak, beside_nan.index) == (0.5, 0.25, (1,))


def test_identical_compares_bits():
    values = torch.tensor([torch.nan, 0.0, 1.0])
    assert identical(values, values.clone())
    assert not identical(values, torch.tensor([torch.nan, -0.0, 1.0]))
    assert not identical(values, values.double())
    assert identical(torch.tensor([True]), torch.tensor([True]))


@pytest.mark.parametrize(
    ("values", "limit"),
    [
        (spread().masked_fill(MASK, -1e9), 2.0**29),
        (spread() - 1e9 * MASK, 2.0**29),
        (spread() - 1e9 * MASK - 1e9 * MASK.T, 2.0**29),  # two masks added
        (spread().masked_fill(MASK, -1e4).masked_fill(MASK.T, -1e9), 2.0**13),  # one after the other
        (spread(4.0).masked_fill(MASK, -1e4), 2.0**13),
        (spread().masked_fill(MASK, torch.finfo(torch.float32).min), 2.0**127),
    ],
)
def test_numbers_that_fill_a_mask_are_told_from_others(values, limit):
    assert tensor_math.filled(values, torch.float32) == limit


@pytest.mark.parametrize(
    "values",
    [
        spread(),
        spread(1e6),
        spread(1e6).relu(),
        spread() / spread().T * 1e4,  # heavy tails
        spread(1e2).exp(),
        torch.softmax(spread(1e3), -1),  # nearly all of it in one element
        torch.eye(64) * 1e9,  # nothing beside it
        torch.full((64, 64), -1e9),
        torch.cat([torch.full((4096,), 1e9), spread(1e-40).flatten()]),  # nothing that float32 holds
        torch.zeros(0),
    ],
)
def test_other_results_have_none(values):
    assert tensor_math.filled(values, torch.float32) is None


def test_the_distribution_of_errors_counts_each_once() -> None:
    off = torch.tensor([0.0, 0.0, 1e-30, 0.05, 0.05, 7.0, 1e9, float("nan")])
    exact, *parts = tensor_math.histogram(off, torch.zeros(8), 1.0)
    low, high, count = tensor_math.SPREAD
    at = [int((math.log10(size) - low) * count / (high - low)) for size in (0.05, 7.0)]
    assert exact == pytest.approx(2 / 7)
    assert {place: share * 7 for place, share in enumerate(parts) if share} == pytest.approx(
        {0: 1, at[0]: 2, at[1]: 1, count - 1: 1}
    )


def test_bits_are_those_of_the_values_whatever_the_memory_holds():
    turned = torch.randn(5, dtype=torch.complex64)
    views = [torch._neg_view(turned.real), turned.conj(), turned.conj().imag, torch._neg_view(turned)]
    for view in [*views, torch._efficientzerotensor((2, 3))]:
        plain = view.clone().resolve_conj().resolve_neg()
        assert identical(view, plain)
        assert checksum(view) == checksum(plain)
        assert alike({"a": view}, {"a": plain}) == {"a"}
        assert not identical(view, plain + 1)
    assert not identical(torch._neg_view(turned.real), turned.real.clone())
