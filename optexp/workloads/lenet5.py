"""LeNet-5: a real network whose every kernel is tiny, so that most of a step is launches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from optexp.program import Batch
from optexp.schema import choice
from optexp.workloads.learner import Learner
from optexp.workloads.operation import normal

CLASSES = 10


def lenet5() -> nn.Module:
    """LeCun's layers, on 28 × 28 images, with ReLU and max-pooling as it is written today."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, CLASSES),
    )  # fmt: skip


@dataclass
class LeNet5(Learner):
    """On random images (batch_size, 1, 28, 28) and classes; cross-entropy when it trains."""

    families: ClassVar = ("normal", "small", "offset")

    mode: str = choice("train", "forward_backward", "forward")

    def model(self) -> nn.Module:
        return lenet5()

    def batch(self, generator: torch.Generator) -> Batch:
        images = normal(generator, self.batch_size, 1, 28, 28)
        classes = torch.randint(CLASSES, (self.batch_size,), generator=generator, device=generator.device)
        return (images, classes)[: 1 + self.targets]

    def loss(self, output: Any, batch: Batch) -> Tensor:
        assert isinstance(batch, tuple)
        return nn.functional.cross_entropy(output, batch[-1])
