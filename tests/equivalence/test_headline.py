"""What a passed verification says in a sentence."""

from __future__ import annotations

import pytest

from optexp.records.verification import Finding, Verification
from optexp.strategy import REASSOCIATES
from optexp.verification.outcome import headline


@pytest.mark.parametrize(("ratio", "close"), [(0.8, True), (1.5, True), (3.41, False)])
def test_nothing_is_as_close_that_errs_by_several_times_as_much(ratio: float, close: bool) -> None:
    passed = Verification("REASSOCIATES", bitwise=False, seeds=[1, 2], families=["as declared"], error_ratio=ratio)
    said = headline(passed, [Finding("output")], REASSOCIATES)
    assert f"at worst {ratio:.2f}×" in said
    assert ("as closely as the baseline" in said) is close
