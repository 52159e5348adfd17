"""A second implementation of each workload of the table of verdicts, as `strategy.replace.target=seconds.py:NAME`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from optexp.kernels.layernorm_linear import LayerNormLinear
from optexp.kernels.softmax import Softmax
from optexp.workloads.bert import Bert
from optexp.workloads.branches import Towers
from optexp.workloads.gelu import GeluOf, functional


def gelu() -> nn.Module:
    """The library's kernel for the formula."""
    return GeluOf(functional)


class Elementwise(nn.Module):
    """Two of three operations on what the first has made."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.empty(8192))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x).add_(self.bias).mul_(1.5)


elementwise = Elementwise


def layernorm_linear() -> nn.Module:
    return LayerNormLinear(nn.LayerNorm(1024), nn.Linear(1024, 1024))


def softmax() -> nn.Module:
    return Softmax(dim=-1)


class Product(nn.Linear):
    """As first written by hand: a product, then the bias."""

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


def products(dim: int) -> nn.Module:
    return nn.Sequential(*(layer for _ in range(4) for layer in (Product(dim, dim), nn.GELU())))


def mlp() -> nn.Module:
    return products(256)


def branches() -> nn.Module:
    return Towers([products(512), products(512)], "sum")


class Network(nn.Sequential):
    """LeNet-5 with what lies between its layers written as functions."""

    def __init__(self) -> None:
        super().__init__()
        for number, layer in {
            0: nn.Conv2d(1, 6, 5, padding=2),
            3: nn.Conv2d(6, 16, 5),
            7: nn.Linear(400, 120),
            9: nn.Linear(120, 84),
            11: nn.Linear(84, 10),
        }.items():
            self.add_module(str(number), layer)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, fourth, last = self
        x = F.max_pool2d(F.relu(first(x), inplace=True), 2)
        x = F.max_pool2d(F.relu(second(x), inplace=True), 2).flatten(1)
        return last(F.relu(fourth(F.relu(third(x), inplace=True)), inplace=True))


lenet5 = training = Network


def bert() -> nn.Module:
    """Attention written out."""
    return Bert(layers=12, hidden=768, heads=12, sequence=256, attention="eager").model()
