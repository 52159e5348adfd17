"""A strategy is called by its YAML: a Python file may hold several classes, and a class serve several YAMLs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import cloudpickle
import pytest

from optexp.config import Experiment
from optexp.errors import ConfigError, Unsupported
from optexp.program import Program
from optexp.strategies.inplace import Inplace
from optexp.strategy import Counters, Evidence, Notes, Stage, Strategy, compose, label, named

HERE = "tests.test_names"
Make = Callable[..., Experiment]


@dataclass
class First(Strategy):
    stage = Stage.MODEL

    by: int = 1
    bars: str = ""

    @property
    def excludes(self) -> frozenset[str]:
        return frozenset({self.bars} - {""})

    def apply(self, program: Program) -> tuple[Program, Notes]:
        return program, {}

    def evidence(self, before: object, after: object, notes: Notes, counters: Counters) -> Evidence:
        return Evidence(True, "asked for")


@dataclass
class Second(First):
    """With an option that has the name of something that is read of strategies."""

    kind: str = "an option that nobody may read as a name"


def chosen(experiment: Make, **classes: str) -> list[Strategy]:
    overrides = [f"+strategy.{name}._target_={HERE}.{cls}" for name, cls in classes.items()]
    return experiment("workload=gelu", *overrides, "+strategy.one.by=2").strategies


def test_a_label_names_the_yamls(experiment: Make) -> None:
    stack = chosen(experiment, one="First", two="Second", three="First")
    assert label(stack) == "one[by=2]+three+two"
    assert [s.name for s in compose(stack)] == ["one", "three", "two"]
    assert [s.name for s in cloudpickle.loads(cloudpickle.dumps(stack))] == ["one", "three", "two"]
    assert [s.name for s in compose([First(), named(First(), "other")])] == ["other", "test_names"]


def test_the_record_has_options_of_each(experiment: Make) -> None:
    overrides = [f"+strategy.{name}._target_={HERE}.First" for name in ("one", "two")]
    resolved = experiment("workload=gelu", *overrides, "+strategy.one.by=2").resolved
    assert (resolved["strategy.one.by"], resolved["strategy.two.by"]) == (2, 1)


@pytest.mark.parametrize("bars", ["second", "test_names"], ids=["by its YAML", "by its file"])
def test_a_partner_is_excluded_by_either_name(bars: str) -> None:
    with pytest.raises(Unsupported, match=r"first.* does not work with second: leave one out"):
        compose([named(First(bars=bars), "first"), named(First(), "second")])


def test_a_shipped_strategy_under_another_name_is_excluded_all_the_same() -> None:
    with pytest.raises(Unsupported, match="does not work with mine"):
        compose([First(bars="inplace"), named(Inplace(), "mine")])


def test_the_same_name_twice_is_refused() -> None:
    with pytest.raises(Unsupported, match="one is twice in the stack: leave one out"):
        compose([named(First(), "one"), named(First(by=2), "one")])
    assert replace(First(), by=3).name == "test_names"


def test_a_class_that_is_no_strategy(experiment: Make) -> None:
    with pytest.raises(ConfigError, match=r"strategy.wrong: optexp.config.*Tracking is no strategy: derive it from"):
        experiment("workload=gelu", "+strategy.wrong._target_=optexp.config.Tracking")
