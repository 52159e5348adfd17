"""An explanation never contradicts the measured verdict beside it."""

from __future__ import annotations

import pytest

from optexp.records.profile import ArmProfile, ProfileRecord
from optexp.reporting.wording import agreeing
from optexp.result import Verdict

STEP, CHANGE = "The profiled step changed", "47 launches became 1"


@pytest.mark.parametrize(
    ("verdict", "before_us", "after_us", "kept"),
    [
        (Verdict.FASTER, 100.0, 50.0, True),
        (Verdict.FASTER, 100.0, 101.0, True),
        (Verdict.FASTER, 100.0, 150.0, False),
        (Verdict.SLOWER, 100.0, 150.0, True),
        (Verdict.SLOWER, 100.0, 50.0, False),
    ],
)
def test_a_trace_that_shows_the_opposite_is_not_quoted(
    verdict: Verdict, before_us: float, after_us: float, kept: bool
) -> None:
    profile = ProfileRecord(ArmProfile({"step_us": before_us}), ArmProfile({"step_us": after_us}))
    first, second = agreeing(verdict, [STEP, CHANGE], profile)
    assert (first == STEP) is kept
    assert second == CHANGE


def test_an_undecided_difference_keeps_the_changes_alone() -> None:
    assert agreeing(Verdict.SAME, [STEP, CHANGE], ProfileRecord()) == [CHANGE]
    assert agreeing(Verdict.FASTER, [], ProfileRecord()) == []


def test_nothing_is_announced_where_no_change_follows() -> None:
    profile = ProfileRecord(ArmProfile({"step_us": 100.0}), ArmProfile({"step_us": 150.0}))
    assert agreeing(Verdict.FASTER, [STEP], profile) == ["The traced steps do not show this difference"]
