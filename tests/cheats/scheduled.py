"""A training step with a schedule, which only Python advances."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Model(nn.Linear):
    def __init__(self) -> None:
        super().__init__(64, 8)


def get_inputs() -> list[Tensor]:
    return [torch.randn(32, 64), torch.randint(8, (32,))]


def get_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    global schedule
    optimizer = torch.optim.SGD(params, lr=0.1)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)  # type: ignore[name-defined]
    return optimizer


def train_step(model: Any, batch: Any, optimizer: Any) -> Tensor:
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    schedule.step()  # type: ignore[name-defined]
    return loss
