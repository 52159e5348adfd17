"""Programs that torch.compile cannot hold in one graph, each for another reason."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor, nn


def reads_a_value(x: Tensor) -> Tensor:
    return x * x.mean().item()


def prints(x: Tensor) -> Tensor:
    x = x + 1
    print(end="")
    return x * 2


def branches_on_a_value(x: Tensor) -> Tensor:
    x = x + 1
    if x.sum() > 0:
        return x * 2
    return x


def breaks_often(x: Tensor) -> Tensor:
    x = x + 1
    print(end="")
    x = x * 2
    torch._dynamo.graph_break()
    if x.sum() > 0:
        x = x - 1
    return x


def prints_in_a_loop(x: Tensor) -> Tensor:
    for _ in range(3):
        x = x + 1
        print(end="")
    return x


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return branches_on_a_value(x)


class Counting(nn.Module):
    """Compiled anew for each value of `calls`, until torch gives up."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


def line(function: Callable[..., object], text: str) -> str:
    """The first line of a function that holds a text, as a record names it."""
    lines, first = inspect.getsourcelines(function)
    return f"broken.py:{next(first + number for number, code in enumerate(lines) if text in code)}"
