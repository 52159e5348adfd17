"""What to try next follows from the verdict: a stack that helps is extended, another is left out."""

from types import SimpleNamespace
from typing import Any

import pytest

from optexp.comparison.modes.compare import next_step
from optexp.comparison.suggestions import suggestion
from optexp.records.profile import Bottleneck
from optexp.workloads.training import Training

BEFORE = [Bottleneck("products", 0.8, "products take 80 %", ("strategy=amp", "strategy=fusion"))]
AFTER = [Bottleneck("passes", 0.6, "passes take 60 %", ("strategy=inplace",))]
AMP, CHANNELS = SimpleNamespace(name="amp"), SimpleNamespace(name="channels_last")
PLAIN = SimpleNamespace(remedies={})
LOADING = Bottleneck("data_loading", 0.81, "the loader takes 81 %", ("strategy=pinned_memory", "more workers"))


@pytest.mark.parametrize(
    ("helps", "baseline", "expected"),
    [
        (True, [], "strategy=[amp,inplace]: passes take 60 %"),
        (False, [], "strategy=fusion: products take 80 %"),
        (False, [CHANNELS], "strategy=[channels_last,fusion]: products take 80 %"),
    ],
)
def test_only_a_stack_that_helps_is_extended(helps: bool, baseline: list[Any], expected: str) -> None:
    session: Any = SimpleNamespace(stack=[AMP], baseline=baseline, workload=PLAIN)
    assert next_step(session, BEFORE, AFTER, helps) == expected


def test_nothing_is_proposed_where_all_remedies_made_it_worse() -> None:
    session: Any = SimpleNamespace(stack=[AMP, SimpleNamespace(name="fusion")], baseline=[], workload=PLAIN)
    assert next_step(session, BEFORE, AFTER, helps=False) is None


@pytest.mark.parametrize(
    ("settings", "without", "expected"),
    [
        ({}, [], "strategy=pinned_memory: the loader takes 81 %"),
        ({"data_loading": "workload.workers=4"}, ["pinned_memory"], "workload.workers=4: the loader takes 81 %"),
        ({}, ["pinned_memory"], "more workers: the loader takes 81 %"),
    ],
)
def test_the_largest_bottleneck_is_answered(settings: dict[str, str], without: list[str], expected: str) -> None:
    assert suggestion([LOADING, *BEFORE], [], without, settings) == expected


def test_a_largest_bottleneck_without_an_answer_is_told() -> None:
    alone = Bottleneck("one_op", 0.9, "aten::sort takes 90 %")
    expected = "nothing here shortens the largest part (aten::sort takes 90 %); then strategy=amp: products take 80 %"
    assert suggestion([alone, *BEFORE], []) == expected
    assert suggestion([alone], []) is None


def test_the_training_loop_has_a_setting_for_its_loader() -> None:
    assert Training().remedies["data_loading"].startswith("workload.workers=")
    assert Training(workers=1000).remedies == {}
