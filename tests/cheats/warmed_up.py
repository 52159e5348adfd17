"""A training step that sets its own learning rate before anything else, by counting."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.cheats.scheduled import Model, get_inputs

__all__ = ["Model", "get_inputs", "get_optimizer", "train_step"]
count = 0


def get_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def train_step(model: Any, batch: Any, optimizer: Any) -> Tensor:
    global count
    count += 1
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * min(1.0, count / 100)
    loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    optimizer.step()
    return loss
