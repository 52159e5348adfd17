"""The table of pairs beside the strategies says what they declare, and how a pair that ran is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from optexp.records.verification import Verification
from optexp.result import Engagement, Result, Verdict
from tests.benchmarks import pairs


def test_the_table_says_what_its_strategies_declare() -> None:
    """A strategy that is newer than the table is not in it."""
    text = pairs.PAGE.read_text()
    table = text.split(pairs.DECLARED[0])[1].split(pairs.DECLARED[1])[0]
    listed = {*re.findall(r"`(\w+)` \|", table)}
    assert len(listed) > 10
    advice = "run: python tests/benchmarks/pairs.py write"
    assert pairs.replaced(text, pairs.DECLARED, pairs.declared(listed)) == text, advice


def result(verdict: Verdict, engaged: bool = True, ok: bool = True) -> Result:
    return Result(
        verdict=verdict,
        headline=f"{verdict}: amp: because",
        workload="mlp",
        strategy=["amp[dtype=float16]", "inplace"],
        device="cuda:0",
        seed=0,
        evidence=[
            Engagement("amp", True, "x"),
            Engagement("inplace", engaged, "y"),
        ],
        equivalence=Verification("REASSOCIATES", ok),
        environment={"gpu": "a card", "torch": "2.0"},
    )


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (result(Verdict.SLOWER), ("✓", "")),
        (result(Verdict.INVALID), ("✓", "")),  # of its timing
        (result(Verdict.NOT_ENGAGED, engaged=False), ("○", "inplace: y")),
        (result(Verdict.NOT_EQUIVALENT, ok=False), ("!", "NOT_EQUIVALENT: amp: because")),
        (result(Verdict.UNSUPPORTED), ("×", "amp: because")),
        (result(Verdict.ERROR), ("E", "amp: because")),
    ],
)
def test_a_pair_that_ran(found: Result, expected: tuple[str, str], tmp_path: Path) -> None:
    assert pairs.outcome(found) == expected
    (tmp_path / "3").mkdir()
    found.write(tmp_path / "3" / "result.json")
    told = pairs.ran(tmp_path)
    assert told.startswith("On a card, torch 2.0.")
    (row,) = (line for line in told.splitlines() if line.startswith("| `inplace`"))
    assert f"{expected[0]}{' 1' if expected[1] else ''} |" in row
    assert not expected[1] or f"1. {expected[1]}" in told
