"""What a passed verification says in a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from optexp.equivalence.gates import exact
from optexp.records.verification import Finding, Verification, broken
from optexp.strategy import REASSOCIATES, precision
from optexp.verification.outcome import aggregate, headline, unseen


@pytest.mark.parametrize(("ratio", "close"), [(0.8, True), (1.5, True), (3.41, False)])
def test_nothing_is_as_close_that_errs_by_several_times_as_much(ratio: float, close: bool) -> None:
    passed = Verification("REASSOCIATES", bitwise=False, seeds=[1, 2], families=["as declared"], error_ratio=ratio)
    said = headline(passed, [Finding("output")], REASSOCIATES)
    assert f"at worst {ratio:.2f}×" in said
    assert ("as closely as the baseline" in said) is close


TIED = Finding("loss", error_rms=0.1, visible=(0.4, 0.1), unseen="the baseline is 0.1 from float64", parted=True)
EQUAL = Finding("loss", error_rms=0.0, bitwise=True, visible=(1e-6, 1e-6), step=1)


@pytest.mark.parametrize(
    ("other", "hidden"),
    [
        (EQUAL, False),
        (replace(EQUAL, visible=(0.5, 0.5)), True),
        (replace(EQUAL, parted=True), True),
        (replace(EQUAL, seed=1), True),
    ],
    ids=["a step whose limit is narrow", "a wide limit", "another program there, too", "a set without noisy runs"],
)
def test_equal_bits_show_a_tensor_beside_a_tie_where_others_would_have_failed(other: Finding, hidden: bool) -> None:
    assert bool(unseen([TIED, other])) is hidden


@pytest.mark.parametrize(("bitwise", "hidden"), [(True, False), (False, True)])
def test_equal_bits_beside_another_program_hide_no_other_bits_in_a_set_without_noisy_runs(
    bitwise: bool, hidden: bool
) -> None:
    other = Finding("loss", error_rms=0.01, bitwise=bitwise, visible=(0.04, 0.04), seed=1)
    assert bool(unseen([replace(EQUAL, parted=True), other])) is hidden


@pytest.mark.parametrize(
    ("dtype", "plain"), [("int8", "plain rounding to int8"), ("float16", "plain float16 autocast")]
)
def test_lower_precision_says_how_far_off_outputs_are(dtype: str, plain: str) -> None:
    passed = Verification("PRECISION", bitwise=False, seeds=[1, 2], families=["as declared"], error_ratio=0.8)
    found = [Finding("output", error_rms=0.03, scale=2.0), Finding("buffer/mean", error_rms=1.0, scale=1.0)]
    said = headline(passed, found, precision(dtype))
    assert f"as closely as {plain} does" in said
    assert "outputs are off by 1.5 % of their RMS" in said
    assert "off by" not in headline(passed, found, REASSOCIATES)


WRONG = Finding("output", "G1", ok=False, failed=("G1",), error_rms=0.1, used=9.0, message="off")


@pytest.mark.parametrize(
    "follows",
    [
        replace(broken("ema", "other"), step=1),
        exact("chosen", torch.tensor([1]), torch.tensor([2]), None),
    ],
    ids=["of a later step", "a choice by the result"],
)
def test_the_first_result_that_is_wrong_is_named_before_what_follows_from_it(follows: Finding) -> None:
    found = aggregate(Verification("REASSOCIATES"), [follows, WRONG], REASSOCIATES)
    assert found.headline.startswith("output fails G1")
