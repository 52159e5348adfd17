"""What a model returns beside tensors is compared too, or named where it cannot be."""

from __future__ import annotations

from collections import deque, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from optexp.program import flatten, lazy, others

Pair = namedtuple("Pair", "a b")


@dataclass
class Result:
    logits: Tensor
    score: float


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({"score": 0.1}, "output.score", torch.tensor(0.1, dtype=torch.float64)),
        ({"count": 3}, "output.count", torch.tensor(3)),
        ({"done": True}, "output.done", torch.tensor(True)),
        ({"rows": [3, 1]}, "output.rows", torch.tensor([3, 1])),
        ({"mixed": (3, 0.5)}, "output.mixed", torch.tensor([3, 0.5], dtype=torch.float64)),
        ([[1, 2], [3]], "output.1", torch.tensor([3])),
        ({"kind": "ab"}, "output.kind", torch.tensor([97, 98], dtype=torch.uint8)),
        ({"z": 1j}, "output.z", torch.tensor(1j, dtype=torch.complex128)),
        ({"array": numpy.ones(2, numpy.float32)}, "output.array", torch.ones(2)),
        (Pair(torch.ones(2), 7), "output.b", torch.tensor(7)),
        ({"bits": b"ab"}, "output.bits", torch.tensor([97, 98], dtype=torch.uint8)),
        ({"met": {3, 1}}, "output.met", torch.tensor([1, 3])),
        ({"words": frozenset({"b", "a"})}, "output.words.1", torch.tensor([98], dtype=torch.uint8)),
        (deque([2, 3]), "output", torch.tensor([2, 3])),
        (Result(torch.ones(2), 0.5), "output.score", torch.tensor(0.5, dtype=torch.float64)),
    ],
)
def test_numbers_and_text_become_tensors(given: Any, name: str, expected: Tensor) -> None:
    found = others(given)[name]
    assert found.dtype is expected.dtype
    assert torch.equal(found, expected)


class Detection:
    """An object of a user's."""

    def __init__(self, count: int = 2, kind: str = "a") -> None:
        self.boxes, self.count, self.kind, self._made = torch.ones(2, 4), count, kind, 7


def test_numbers_and_texts_of_an_object_with_tensors_are_read() -> None:
    assert list(flatten(Detection())) == ["output.boxes"]
    found = others({"found": [Detection(3, "b")]})
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "output.found.0.count": 3,
        "output.found.0.kind": [98],
    }


class Slotted:
    __slots__ = ("boxes", "count")

    def __init__(self) -> None:
        self.boxes, self.count = torch.ones(2, 4), 2


def test_slots_and_queues_are_looked_into() -> None:
    given = (deque([torch.ones(1), Slotted()]), Slotted())
    assert list(flatten(given)) == ["output.0.0", "output.0.1.boxes", "output.1.boxes"]
    assert list(others(given)) == ["output.0.1.count", "output.1.count"]


def test_what_computes_its_values_later_is_known() -> None:
    found = others({"y": torch.ones(2), "later": (value for value in (1, 2)), "other": object()})
    assert [lazy(name) for name in found] == [True, False]


def test_keys_that_read_alike_hide_nothing() -> None:
    found = flatten({1: torch.ones(1), "1": torch.zeros(1), "a.b": torch.ones(2), "a": {"b": torch.zeros(2)}})
    assert [float(tensor.sum()) for tensor in found.values()] == [1, 0, 2, 0]
    assert list(others({1: 5, "1": 6}).values()) == [torch.tensor(5), torch.tensor(6)]


@pytest.mark.parametrize("unread", [object(), {torch.ones(1)}, 2**70, numpy.array(["a"]), torch.float32])
def test_what_cannot_be_read_is_named(unread: Any) -> None:
    found = others({"y": torch.ones(2), "x": unread})
    assert list(found) == [f"output.x (unread {type(unread).__name__})"]
    assert not next(iter(found.values())).numel()


def test_nested_tensors_are_the_dense_ones_that_they_consist_of() -> None:
    parts = [torch.ones(2, 3), torch.zeros(1, 3)]
    jagged = torch.nested.nested_tensor(parts, layout=torch.jagged)
    assert {name: t.shape for name, t in flatten(jagged).items()} == {"output.values": (3, 3), "output.offsets": (3,)}
    strided = torch.nested.nested_tensor(parts, layout=torch.strided)
    assert {name: t.shape for name, t in flatten({"y": strided}).items()} == {
        "output.y.0": (2, 3),
        "output.y.1": (1, 3),
    }
    assert others(jagged) == {}


def test_tensors_are_no_others_and_nothing_is_nothing() -> None:
    given = {"y": torch.ones(2), "none": None, "list": [], "deep": [torch.zeros(1), None]}
    assert list(flatten(given)) == ["output.y", "output.deep.0"]
    assert others(given) == {}
