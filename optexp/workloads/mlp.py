"""A multilayer perceptron: many small kernels at small sizes, matrix products at large ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optexp.program import Batch
from optexp.schema import choice
from optexp.workloads.learner import Learner
from optexp.workloads.operation import normal

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "tanh": nn.Tanh}


class ProductAndBias(nn.Module):
    """A linear layer as first written by hand: a product, then an addition, in two kernels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) / inputs**0.5)
        self.bias = nn.Parameter(torch.randn(outputs) / inputs**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@dataclass
class Mlp(Learner):
    """`layers` layers of width `dim` on (batch_size, in_features); mean squared error when it trains.

    style:      stack: nn.Linear with an activation after each; linear: with activations only between layers, as in a
                regression; products: the same, each layer a product and a separate bias
    in_features, out_features: `dim` where left open
    num_steps:  how often the whole is applied to its own output, one pass after the other
    """

    families: ClassVar = ("normal", "integers", "corners", "large", "small", "offset", "constant_rows")

    dim: int = 256
    layers: int = 4
    activation: str = choice("gelu", "relu", "tanh")
    style: str = choice("stack", "linear", "products")
    in_features: int | None = None
    out_features: int | None = None
    num_steps: int = 1

    def __post_init__(self) -> None:
        if self.layers < 1 or self.num_steps < 1:
            raise ValueError(f"layers={self.layers} and num_steps={self.num_steps} must both be at least 1")
        if self.num_steps > 1 and self.widths[0] != self.widths[-1]:
            raise ValueError(
                f"num_steps={self.num_steps} feeds the output back, and {self.widths[-1]} features do not fit where"
                f" {self.widths[0]} are expected: give in_features and out_features the same size"
            )

    @property
    def widths(self) -> list[int]:
        """Features before the first layer and after each."""
        first = self.dim if self.in_features is None else self.in_features
        last = self.dim if self.out_features is None else self.out_features
        return [first, *[self.dim] * (self.layers - 1), last]

    def chain(self) -> list[nn.Module]:
        """The layers of all passes, in the order in which they are called."""
        layer = ProductAndBias if self.style == "products" else nn.Linear
        activation = ACTIVATIONS[self.activation]
        once = [module for sizes in pairwise(self.widths) for module in (layer(*sizes), activation())]
        return (once if self.style == "stack" else once[:-1]) * self.num_steps

    def model(self) -> nn.Module:
        return nn.Sequential(*self.chain())

    def batch(self, generator: torch.Generator) -> Batch:
        features = (self.widths[0], self.widths[-1])[: 1 + self.targets]
        return tuple(normal(generator, self.batch_size, size) for size in features)

    def loss(self, output: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        return nn.functional.mse_loss(output, batch[-1])
