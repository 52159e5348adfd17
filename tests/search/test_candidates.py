"""Changes of a stack that a search proposes, and their order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from optexp.comparison.candidates import candidates, grown, options_of, order, remedy
from optexp.comparison.suggestions import installed
from optexp.records.profile import Bottleneck
from optexp.strategy import Evidence, Remedy, Stage, Strategy, named


@dataclass
class Plain(Strategy):
    stage: ClassVar[Stage] = Stage.REWRITE
    level_of_it: int = 0

    def apply(self, program: Any) -> Any:
        return program, {}

    def evidence(self, *args: Any) -> Evidence:
        return Evidence(True, "")


@dataclass
class Compiles(Plain):
    stage: ClassVar[Stage] = Stage.COMPILE
    variants = ({"level_of_it": 2}, {"level_of_it": 3})

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        return (Remedy("dispatch"), Remedy("compute_bound", options={"level_of_it": 2}))


COMPILER, OTHER, PLAIN = named(Compiles(), "compiler"), named(Compiles(), "other"), named(Plain(), "plain")


def test_options_of_remedies_and_those_declared_for_a_search_are_tried_once() -> None:
    assert [dict(options) for options in options_of(COMPILER)] == [{}, {"level_of_it": 2}, {"level_of_it": 3}]


def test_every_change_of_a_stack() -> None:
    found, refused = candidates([COMPILER], [COMPILER, OTHER, PLAIN])
    changes = {c.change: (c.swaps, [member.label for member in c.stack]) for c in found}
    assert changes == {
        "compiler[level_of_it=2]": (True, ["compiler[level_of_it=2]"]),
        "compiler[level_of_it=3]": (True, ["compiler[level_of_it=3]"]),
        "plain": (False, ["plain", "compiler"]),
    }
    assert [entry.change for entry in refused] == ["other", "other[level_of_it=2]", "other[level_of_it=3]"]
    assert "both compile the program" in refused[0].reason


def test_bounds_come_first_then_the_diagnosis() -> None:
    found, _ = candidates([COMPILER], [COMPILER, PLAIN])
    two, three, plain = sorted(found, key=lambda c: c.change)
    bottlenecks = [
        Bottleneck("dispatch", 0.5, "", (), ("dispatch",)),
        Bottleneck("products", 0.4, "", (), ("compute_bound",)),
    ]
    assert order(plain, 1.2, bottlenecks) < order(plain, 1.1, bottlenecks) < order(two, None, bottlenecks)
    assert order(two, 9.0, []) > order(plain, 1.1, []), "options wait for the strategy as it is"
    assert order(two, None, bottlenecks) < order(plain, None, bottlenecks) < order(three, None, bottlenecks)
    (_, _, fresh), _ = candidates([], [COMPILER])
    assert order(three, None, bottlenecks) < order(fresh, None, bottlenecks), "members' options before those of others"


def test_declared_variants_are_options_of_their_strategies() -> None:
    for strategy in installed():
        for candidate in candidates([], [strategy])[0]:
            assert candidate.strategy.name == strategy.name
            assert candidate.typed.startswith(f"strategy={strategy.name}")


def test_a_companion_answers_what_a_change_has_left() -> None:
    """amp of a small GPT on an H100: the step went from 92 % busy to 23 %."""
    by_name = {strategy.name: strategy for strategy in installed()}
    now = [
        Bottleneck("cpu_bottleneck", 0.72, "the GPU waits for the host"),
        Bottleneck("compute_bound", 0.2, "products", causes=("compute_bound",)),
        Bottleneck("many_small_kernels", 0.29, "1391 kernels", causes=("many_small_kernels",)),
    ]
    limits = grown({"many_small_kernels": 0.12, "compute_bound": 0.63}, now)
    assert [bottleneck.label for bottleneck in limits] == ["cpu_bottleneck", "many_small_kernels"]
    found = remedy([by_name["amp"]], [*by_name.values()], limits)
    assert found is not None
    assert found.change == "cuda_graph"
    assert [strategy.name for strategy in found.stack] == ["amp", "cuda_graph"]
    assert remedy([by_name["amp"]], [*by_name.values()], now[:1]) is None
