"""What to try next follows from the verdict: a stack that helps is extended, another is left out."""

from types import SimpleNamespace
from typing import Any

import pytest

from optexp.comparison.modes.compare import next_step
from optexp.records.profile import Bottleneck

BEFORE = [Bottleneck("products", 0.8, "products take 80 %", ("strategy=amp", "strategy=fusion"))]
AFTER = [Bottleneck("passes", 0.6, "passes take 60 %", ("strategy=inplace",))]
AMP, CHANNELS = SimpleNamespace(name="amp"), SimpleNamespace(name="channels_last")


@pytest.mark.parametrize(
    ("helps", "baseline", "expected"),
    [
        (True, [], "strategy=[amp,inplace]: passes take 60 %"),
        (False, [], "strategy=fusion: products take 80 %"),
        (False, [CHANNELS], "strategy=[channels_last,fusion]: products take 80 %"),
    ],
)
def test_only_a_stack_that_helps_is_extended(helps: bool, baseline: list[Any], expected: str) -> None:
    session: Any = SimpleNamespace(stack=[AMP], baseline=baseline)
    assert next_step(session, BEFORE, AFTER, helps) == expected


def test_nothing_is_proposed_where_all_remedies_made_it_worse() -> None:
    session: Any = SimpleNamespace(stack=[AMP, SimpleNamespace(name="fusion")], baseline=[])
    assert next_step(session, BEFORE, AFTER, helps=False) is None
