"""A training step with a teacher, whose weights are a moving average of the student's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(64, 8), nn.Linear(64, 8)
        self.teacher.load_state_dict(self.student.state_dict())
        self.teacher.requires_grad_(False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.student(x), self.teacher(x)


def get_inputs() -> list[Tensor]:
    return [torch.randn(32, 64), torch.randint(8, (32,))]


def get_optimizer(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.1)


def train_step(model: Any, batch: Any, optimizer: Any) -> Tensor:
    ours, theirs = model(batch[0])
    optimizer.zero_grad()
    loss = nn.functional.cross_entropy(ours, batch[1]) + nn.functional.mse_loss(ours, theirs)
    loss.backward()
    optimizer.step()
    with torch.no_grad():
        for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            slow.lerp_(fast, 0.1)
    return loss
