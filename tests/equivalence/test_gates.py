"""The gates as functions over tensors: what each of them sees, and what the others would let through."""

from __future__ import annotations

import json
import math
from dataclasses import asdict

import pytest
import torch

from optexp.equivalence import gates
from optexp.equivalence.gates import Error, Limits, Yardstick, error, exact, identical, measure, structure
from optexp.support.tolerances import TOLERANCES

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def judged(candidate, baseline, reference, dtype="float32", **limits):
    scale = gates.rms(reference)
    baseline_error, found = error(baseline, reference, scale), error(candidate, reference, scale)
    yardstick = Yardstick.of(baseline_error)
    return measure("output", found, scale, yardstick, yardstick, Limits(TOLERANCES[dtype], **limits))


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
    monkeypatch.setattr(gates, "CHUNK", chunk)
    parts = error(candidate, reference, 1.0)
    assert parts.index == whole.index
    assert parts.rms == pytest.approx(whole.rms, rel=1e-12)
    assert gates.rms(reference) == pytest.approx(reference.square().mean().sqrt().item(), rel=1e-12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [1, 3, 100])
def test_many_tensors_are_looked_at_as_each_by_itself(monkeypatch, rows, device):
    shapes = [(), (0,), (3, 5), (gates.BLOCK,), (2, gates.BLOCK), (5, 1000), (1,)]
    ours = [torch.randn(shape, device=device) for shape in shapes]
    ours[2][1, 1], ours[4][1, 7] = torch.nan, torch.inf
    theirs = [tensor.double() + 0.1 * torch.randn(tensor.shape, device=device) for tensor in ours]
    scales = [1.0, 1.0, 0.0, 2.0, 0.5, 1.0, 0.0]
    monkeypatch.setattr(gates, "CHUNK", rows * gates.BLOCK)
    for c, g, s, found in zip(
        ours, theirs, scales, gates.errors([*zip(ours, theirs, scales, strict=True)]), strict=True
    ):
        off = (c.double() - g).abs()
        off[~off.isfinite()] = 0
        known = max(1, int((c.double() - g).isfinite().sum()))
        weighted = (off * (s / (g.abs() + s) if s else 1.0)).nan_to_num(0)
        assert found.rms == pytest.approx((off.square().sum() / known).sqrt().item(), rel=1e-12)
        assert found.peak == pytest.approx(weighted.max().item() if c.numel() else 0.0, rel=1e-12)
        assert found.index is None or weighted[found.index] == weighted.max()
        assert (found.blocks is None) == (c.numel() <= gates.BLOCK)
        if found.blocks is not None:
            squares = torch.nn.functional.pad(off.flatten().square(), (0, -c.numel() % gates.BLOCK))
            assert torch.allclose(found.blocks, squares.cpu().view(-1, gates.BLOCK).mean(1).sqrt())
    assert gates.sizes(ours) == pytest.approx([gates.rms(tensor) for tensor in ours], rel=1e-12)
    assert gates.peaks(ours) == [gates.largest(tensor) for tensor in ours]
    assert gates.finite(dict(enumerate(ours))) == {0, 1, 3, 5, 6}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_one_that_is_not_finite_is_found_wherever_it_is(device: str, dtype: torch.dtype):
    tensors = {"all": torch.ones(300_001, dtype=dtype, device=device)}
    for value in (torch.nan, torch.inf, -torch.inf):
        for place in (0, 65_535, 65_536, 200_000, 300_000):
            tensors[f"{value} at {place}"] = tensors["all"].clone()
            tensors[f"{value} at {place}"][place] = value
    assert gates.finite(tensors) == {"all"}
    assert gates.finite({}) == set()
    assert gates.sizes([torch.empty(0, dtype=dtype, device=device)]) == [0.0]


@pytest.mark.parametrize("device", DEVICES)
def test_alike_are_those_that_are_identical(device: str):
    ours = {"nan": torch.tensor([torch.nan]), "zero": torch.zeros(2), "long": torch.arange(9999), "gaps": torch.eye(3)}
    ours = {name: tensor.to(device) for name, tensor in ours.items()}
    theirs = {name: tensor.clone() for name, tensor in ours.items()} | {"other": torch.ones(1)}
    ours["gaps"], theirs["gaps"] = ours["gaps"][:, 1], theirs["gaps"][:, 1]
    assert gates.alike(ours, theirs) == ours.keys()
    theirs["zero"][1] = -0.0
    theirs["long"][9998] = 0
    theirs["nan"] = theirs["nan"].double()
    assert gates.alike(ours, theirs) == {"gaps"}
    assert gates.alike({}, theirs) == set()


def test_error_of_nothing_of_scalars_and_of_complex_numbers():
    assert error(torch.empty(0), torch.empty(0), 0.0) == Error()
    assert error(torch.tensor(1.5), torch.tensor(1.0), 1.0).index == ()
    found = error(torch.tensor([1 + 2j]), torch.tensor([1 + 1j]), 1.0)
    assert found.index == (0, 1)  # the imaginary part of the first
    assert error(torch.tensor([torch.nan, 1.0]), torch.tensor([torch.nan, 1.0]), 1.0).rms == 0.0
    beside_nan = error(torch.tensor([torch.inf, 1.5, torch.nan]), torch.tensor([torch.inf, 1.0, torch.nan]), 1.0)
    assert (beside_nan.rms, beside_nan.peak, beside_nan.index) == (0.5, 0.25, (1,))


def test_one_element_that_the_rms_does_not_see_is_seen_by_g2(reference):
    baseline = reference.bfloat16()
    candidate = baseline.clone()
    candidate[17, 5] += 0.05 * 1.0
    finding = judged(candidate, baseline, reference, "bfloat16")
    assert finding.failed == ("G2",)
    assert finding.element.index == [17, 5]
    assert finding.error_ratio < 1.05
    json.dumps(asdict(finding), allow_nan=False)


def test_a_small_error_everywhere_is_seen_by_g1(reference):
    reference = reference.sign()  # exact in float32, so that the baseline has no error
    assert not judged((reference * (1 + 1e-6)).float(), reference.float(), reference).ok
    assert judged((reference * (1 + 1e-7)).float(), reference.float(), reference).ok


def test_a_small_error_of_one_block_is_seen_by_g3(reference):
    """Too small for the worst element, too few elements for the RMS."""
    noise = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e-4
    baseline = reference + noise
    candidate = baseline.clone()
    candidate[32:48] += 6e-4 * torch.sign(noise[32:48])
    finding = judged(candidate, baseline, reference)
    assert finding.failed == ("G3",)
    assert "elements 8192 to 12287" in finding.message
    assert finding.block_ratio == pytest.approx(6.85, rel=0.1)


def test_a_block_in_which_the_baseline_errs_more_may_err_more(reference):
    reference = reference.repeat(2, 2)
    noise = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e-4
    noise[32:40] *= 20
    assert judged(reference + noise.flip(1), reference + noise, reference).ok
    assert "G3" in judged(reference + noise.flip(0), reference + noise, reference).failed


def test_doubled_output_has_a_perfect_cosine_and_fails(reference):
    finding = judged(reference.float() * 2, reference.float(), reference)
    assert finding.failed == ("G1", "G2", "G3")


def test_between_warning_and_failure_a_result_is_weak(reference):
    noise = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e-4
    baseline, candidate = reference + noise, reference + 3 * noise
    finding = judged(candidate, baseline, reference)
    assert finding.ok
    assert finding.weak
    assert finding.error_ratio == pytest.approx(3)
    assert not judged(reference + 5 * noise, baseline, reference).ok
    assert not judged(candidate, baseline, reference, gradient=True).ok


def test_precision_has_an_absolute_cap(reference):
    baseline = reference * 1.2  # an autocast that is itself 20 % off
    assert judged(baseline, baseline, reference, "bfloat16").ok
    assert judged(baseline, baseline, reference, "bfloat16", cap=32.0).failed == ("CAP",)


def test_a_reference_of_zeros_allows_what_the_baseline_does():
    zeros = torch.zeros(32, dtype=torch.float64)
    assert judged(zeros + 1e-9, zeros + 1e-9, zeros).ok
    assert not judged(zeros + 1e-7, zeros + 1e-9, zeros).ok


@pytest.mark.parametrize(
    ("candidate", "reason"),
    [
        (torch.zeros(3, 2), "shape"),
        (torch.zeros(2, 3, dtype=torch.float64), "dtype"),
        (torch.tensor([[0, 0, 0], [0, torch.nan, 0]]), "element [1, 1]"),
        (torch.tensor([[0, -torch.inf, 0], [0, 0, 0]]), "element [0, 1]"),
    ],
)
def test_structure_says_what_differs(candidate, reason):
    assert reason in structure(candidate, torch.zeros(2, 3))


def test_structure_accepts_equal_masks_and_a_dtype_where_the_contract_does():
    values = torch.tensor([torch.nan, torch.inf, -torch.inf, 1.0])
    assert structure(values + 1, values) is None
    assert structure(values.bfloat16(), values, any_dtype=True) is None
    assert structure(-values, values) is not None  # the signs of infinities count


def test_identical_compares_bits():
    values = torch.tensor([torch.nan, 0.0, 1.0])
    assert identical(values, values.clone())
    assert not identical(values, torch.tensor([torch.nan, -0.0, 1.0]))
    assert not identical(values, values.double())
    assert identical(torch.tensor([True]), torch.tensor([True]))


def test_integers_are_exact_up_to_a_tie_with_fp64():
    baseline, reference = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert exact("top", torch.tensor([1, 2, 3]), baseline, reference).bitwise
    assert exact("top", torch.tensor([1, 2, 4]), baseline, reference).ok
    assert not exact("top", torch.tensor([1, 3, 3]), baseline, reference).ok
    noisy = [torch.tensor([1, 3, 3]), torch.tensor([1, 2, 5])]
    assert exact("top", torch.tensor([1, 3, 5]), baseline, reference, noisy).ok
    assert not exact("top", torch.tensor([3, 2, 3]), baseline, reference, noisy).ok


MASK = torch.rand(61, 61, generator=torch.Generator().manual_seed(2)) < 0.5


def spread(scale=1.0):
    return scale * torch.randn(61, 61, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


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
    assert gates.filled(values, torch.float32) == limit


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
    assert gates.filled(values, torch.float32) is None


def test_the_distribution_of_errors_counts_each_once() -> None:
    off = torch.tensor([0.0, 0.0, 1e-30, 0.05, 0.05, 7.0, 1e9, float("nan")])
    exact, *parts = gates.histogram(off, torch.zeros(8), 1.0)
    low, high, count = gates.SPREAD
    at = [int((math.log10(size) - low) * count / (high - low)) for size in (0.05, 7.0)]
    assert exact == pytest.approx(2 / 7)
    assert {place: share * 7 for place, share in enumerate(parts) if share} == pytest.approx(
        {0: 1, at[0]: 2, at[1]: 1, count - 1: 1}
    )


def test_blocks_of_another_batch_leave_a_yardsticks_own_as_they_are() -> None:
    """Columns that are small in one batch need not be in the next, so that there are more or fewer of them."""
    ours, theirs = Yardstick(1.0, 2.0, torch.ones(3)), Yardstick(2.0, 1.0, torch.ones(4))
    both = ours | theirs
    assert (both.rms, both.peak) == (2.0, 2.0)
    assert both.blocks is not None
    assert len(both.blocks) == 3
    assert (ours | Yardstick(0.0, 0.0, torch.full((3,), 2.0))).blocks.tolist() == [2.0] * 3  # type: ignore[union-attr]
