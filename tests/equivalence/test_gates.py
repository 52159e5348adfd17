"""The gates as functions over tensors: what each of them sees, and what the others would let through."""

from __future__ import annotations

import json
from dataclasses import asdict

import pytest
import torch

from optexp.equivalence import tensor_math
from optexp.equivalence.gates import Limits, Yardstick, exact, measure, structure
from optexp.equivalence.tensor_math import error
from optexp.support.tolerances import TOLERANCES, of_a_zero


def gated(candidate, baseline, reference, dtype="float32", **limits):
    scale = tensor_math.rms(reference)
    baseline_error, found = error(baseline, reference, scale), error(candidate, reference, scale)
    yardstick = Yardstick.of(baseline_error)
    return measure("output", found, scale, yardstick, yardstick, Limits(TOLERANCES[dtype], **limits))


@pytest.fixture
def reference():
    return torch.randn(256, 256, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def test_one_element_that_the_rms_does_not_see_is_seen_by_g2(reference):
    baseline = reference.bfloat16()
    candidate = baseline.clone()
    candidate[17, 5] += 0.05 * 1.0
    finding = gated(candidate, baseline, reference, "bfloat16")
    assert finding.failed == ("G2",)
    assert finding.element.index == [17, 5]
    assert finding.error_ratio < 1.05
    json.dumps(asdict(finding), allow_nan=False)


def test_a_small_error_everywhere_is_seen_by_g1(reference):
    reference = reference.sign()  # exact in float32, so that the baseline has no error
    assert not gated((reference * (1 + 1e-6)).float(), reference.float(), reference).ok
    assert gated((reference * (1 + 1e-7)).float(), reference.float(), reference).ok


def test_a_small_error_of_one_block_is_seen_by_g3(reference):
    """Too small for the worst element, too few elements for the RMS."""
    noise = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e-4
    baseline = reference + noise
    candidate = baseline.clone()
    candidate[32:48] += 6e-4 * torch.sign(noise[32:48])
    finding = gated(candidate, baseline, reference)
    assert finding.failed == ("G3",)
    assert "elements 8192 to 12287" in finding.message
    assert finding.block_ratio == pytest.approx(6.85, rel=0.1)


def test_a_block_in_which_the_baseline_errs_more_may_err_more(reference):
    reference = reference.repeat(2, 2)
    noise = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e-4
    noise[32:40] *= 20
    assert gated(reference + noise.flip(1), reference + noise, reference).ok
    assert "G3" in gated(reference + noise.flip(0), reference + noise, reference).failed


def test_doubled_output_has_a_perfect_cosine_and_fails(reference):
    finding = gated(reference.float() * 2, reference.float(), reference)
    assert finding.failed == ("G1", "G2", "G3")


def test_between_warning_and_failure_a_result_is_weak(reference):
    noise = torch.randn(reference.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1e-4
    baseline, candidate = reference + noise, reference + 3 * noise
    finding = gated(candidate, baseline, reference)
    assert finding.ok
    assert finding.weak
    assert finding.error_ratio == pytest.approx(3)
    assert not gated(reference + 5 * noise, baseline, reference).ok
    assert not gated(candidate, baseline, reference, gradient=True).ok


def test_precision_has_an_absolute_cap(reference):
    baseline = reference * 1.2  # an autocast that is itself 20 % off
    assert gated(baseline, baseline, reference, "bfloat16").ok
    assert gated(baseline, baseline, reference, "bfloat16", cap=32.0).failed == ("CAP",)


def test_a_reference_of_zeros_allows_what_the_baseline_does():
    zeros = torch.zeros(32, dtype=torch.float64)
    assert gated(zeros + 1e-9, zeros + 1e-9, zeros).ok
    assert not gated(zeros + 1e-7, zeros + 1e-9, zeros).ok


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


def test_integers_are_exact_up_to_a_tie_with_fp64():
    baseline, reference = torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4])
    assert exact("top", torch.tensor([1, 2, 3]), baseline, reference).bitwise
    assert exact("top", torch.tensor([1, 2, 4]), baseline, reference).ok
    assert not exact("top", torch.tensor([1, 3, 3]), baseline, reference).ok
    noisy = [torch.tensor([1, 3, 3]), torch.tensor([1, 2, 5])]
    assert exact("top", torch.tensor([1, 3, 5]), baseline, reference, noisy).ok
    assert not exact("top", torch.tensor([3, 2, 3]), baseline, reference, noisy).ok


def test_blocks_of_another_batch_leave_a_yardsticks_own_as_they_are() -> None:
    """Columns that are small in one batch need not be in the next, so that there are more or fewer of them."""
    ours, theirs = Yardstick(1.0, 2.0, torch.ones(3)), Yardstick(2.0, 1.0, torch.ones(4))
    both = ours | theirs
    assert (both.rms, both.peak) == (2.0, 2.0)
    assert both.blocks is not None
    assert len(both.blocks) == 3
    assert (ours | Yardstick(0.0, 0.0, torch.full((3,), 2.0))).blocks.tolist() == [2.0] * 3  # type: ignore[union-attr]


def test_a_sum_that_is_zero_is_rounding_up_to_what_a_long_running_sum_leaves() -> None:
    """Biases of a convolution before a batch norm, compiled on a CPU: up to 45 u of the terms, one element 190 u."""
    u, terms, reference = TOLERANCES["float32"].unit, 1.4, torch.zeros(16, dtype=torch.float64)
    baseline, candidate = torch.full((16,), 4 * u * terms), torch.full((16,), 40 * u * terms)
    candidate[3] = 190 * u * terms

    def finding(values, zero):
        yardstick = Yardstick.of(error(baseline, reference, terms))
        found = error(values, reference, terms)
        return measure("grad/bias", found, terms, yardstick, yardstick, Limits(TOLERANCES["float32"], True, zero=zero))

    assert finding(candidate, zero=True).ok
    assert not finding(candidate, zero=False).ok
    assert not finding(candidate.fill_(1e-3 * terms), zero=True).ok


@pytest.mark.parametrize(("dtype", "most"), [("float32", 512 * 2.0**-24), ("bfloat16", 0.002), ("tf32", 0.002)])
def test_a_zero_is_seen_to_a_small_share_of_its_terms_in_every_arithmetic(dtype: str, most: float) -> None:
    assert of_a_zero(TOLERANCES[dtype].unit) == most
