"""What is copied out of a module, what is imported, and what cannot be said without it."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from optexp.errors import NotCovered
from optexp.export.inlining import Inliner, code_of, flat_class, literal, uses

SOURCE = """
from __future__ import annotations
import math
from collections import Counter as Bag
from typing import TYPE_CHECKING
from optexp.workload import known
if TYPE_CHECKING:
    from optexp.program import Program

LIMIT = 3
LIMIT += 1
Pair = tuple[int, int]

# Says why.
def doubled(x: int) -> int:
    limit = LIMIT  # a comment
    return 2 * known(x) + limit

def unused() -> None: ...

def first(bag: Bag) -> Pair:
    return doubled(math.floor(next(iter(bag))))

def lazy():
    from optexp import discovery
    return discovery
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"inlined_{abs(hash(tmp_path))}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield name
    sys.modules.pop(name, None)


def test_what_is_used_is_copied_in_order_and_runs(module: str) -> None:
    inliner = Inliner({module})
    lines = inliner.lines("from collections import deque\nresult = first(deque([4]))", module)
    assert lines == "result = first(deque([4]))"
    text = f"from __future__ import annotations\n{inliner.imports()}\n{inliner.take()}\n{lines}\n"
    assert "# Says why.\ndef doubled" in text
    assert "# a comment" in text
    assert "LIMIT = 3\nLIMIT += 1\n" in text
    assert "def known" in text
    assert "unused" not in text
    assert "from collections import Counter as Bag, deque" in text
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["result"] == 12
    assert inliner.take() == ""


@pytest.mark.parametrize(
    ("lines", "reserved", "words"),
    [
        ("lazy()", [], "imports optexp inside a function"),
        ("doubled(1)", ["known"], "known of optexp.workload would take the name of another"),
        ("import optexp.config", [], "needs the module optexp.config as a whole"),
        ("from optexp.workload import known as sure", [], "known of optexp.workload is called sure"),
    ],
)
def test_what_cannot_be_copied_is_named(module: str, lines: str, reserved: list[str], words: str) -> None:
    with pytest.raises(NotCovered, match=words):
        Inliner({module}, reserved).lines(lines, module)


def test_names_that_are_bound_inside_are_no_uses() -> None:
    tree = ast.parse("def f(a: A, b=C) -> D:\n    e = a\n    return [g(h, e) for h in b]\nclass K(L):\n    m: N = 1")
    assert uses(tree.body) == {"C", "g", "L"}


@dataclass
class Base:
    size: int = 2
    names: list[str] = field(default_factory=lambda: ['a"b'])

    @property
    def area(self) -> int:
        return self.size**2


@dataclass
class Square(Base):
    size: int = 3
    whatever: Any = None

    def build(self) -> list[str]:
        return self.names * self.area

    def greedy(self) -> int:
        return super().area


def test_a_class_without_its_bases_keeps_what_is_used() -> None:
    text = flat_class(Square(size=4, whatever=object()), ["build"], Inliner({__name__}))
    assert "whatever" not in text
    names: dict[str, Any] = {}
    exec(text, names)
    assert names["Square"]().build() == ['a"b'] * 16
    with pytest.raises(NotCovered, match="calls super"):
        flat_class(Square(), ["greedy"], Inliner({__name__}))
    with pytest.raises(NotCovered, match="whatever is object"):
        flat_class(Square(whatever=object()), ["whatever"], Inliner({__name__}))


@pytest.mark.parametrize("value", ["a", 'a"b', "a'b", "a\nb", 1.5, None, [1, {"a": (2,)}]])
def test_values_are_written_so_that_they_read_the_same(value: Any) -> None:
    assert ast.literal_eval(literal(value, "it")) == value


class Branchless(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor, scale: float = float("inf")) -> torch.Tensor:
        return torch.clamp(self.linear(x).mul_(2), max=scale) + nn.functional.relu(x)


def test_the_code_of_a_traced_model_works_on_the_model_itself() -> None:
    model = Branchless()
    text = code_of(fx.symbolic_trace(model))
    assert text is not None
    names: dict[str, Any] = {"torch": torch}
    exec(text, names)
    x = torch.randn(3, 2)
    assert torch.equal(names["rewritten"](model, x), model(x))


class WithConstant(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.ones(2)


def test_what_only_the_traced_model_holds_cannot_be_written() -> None:
    assert code_of(fx.symbolic_trace(WithConstant())) is None
