"""A stack of equal linear layers with an activation after each: many small kernels at small sizes, GEMMs at large."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optexp.config import one_of
from optexp.program import Batch
from optexp.workload import Workload

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "tanh": nn.Tanh}


@dataclass
class Mlp(Workload):
    """`layers` times Linear(dim, dim) and an activation, on (batch_size, dim); mean squared error when it trains."""

    mode: str = one_of("forward_backward", "forward", "train")
    dim: int = 256
    layers: int = 4
    batch_size: int = 256
    activation: str = one_of("gelu", "relu", "tanh")
    optim: str = one_of("adamw", "sgd")
    lr: float = 1e-3

    @property
    def samples(self) -> int:
        return self.batch_size

    @property
    def targets(self) -> int:
        return 0 if self.mode == "forward" else 1

    def model(self) -> nn.Module:
        activation = ACTIVATIONS[self.activation]
        return nn.Sequential(*(m for _ in range(self.layers) for m in (nn.Linear(self.dim, self.dim), activation())))

    def batch(self, generator: torch.Generator) -> Batch:
        return tuple(
            torch.randn(self.batch_size, self.dim, generator=generator, device=generator.device)
            for _ in range(1 + self.targets)
        )

    def loss(self, output: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        return nn.functional.mse_loss(output, batch[-1])

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        if self.optim == "sgd":
            return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9)
        return torch.optim.AdamW(model.parameters(), lr=self.lr)
