"""Convolutions written as products: each unfolds its input into scratch memory that it keeps from call to call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from optexp.program import Batch
from optexp.schema import choice
from optexp.workload import Workload, known
from optexp.workloads.operation import normal

KERNEL = 3


class Unfolded(nn.Module):
    """A 3 × 3 convolution as one product over all patches of the image.

    workspace:  the patches (batch, channels · 9, pixels) of the last call; no later call reads them
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        features = channels * KERNEL**2
        self.weight = nn.Parameter(torch.randn(channels, features) / features**0.5)
        self.bias = nn.Parameter(torch.zeros(channels, 1))
        self.workspace = torch.empty(0, 0, 0)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, height, width = x.shape
        shape, kept = (batch, self.weight.shape[1], height * width), self.workspace
        if kept.shape != shape or kept.dtype != x.dtype or kept.device != x.device:
            kept = self.workspace = x.new_empty(shape)
        torch.ops.aten.im2col.out(x, [KERNEL, KERNEL], [1, 1], [KERNEL // 2, KERNEL // 2], [1, 1], out=kept)
        return (self.weight @ kept + self.bias).view(batch, -1, height, width)


@dataclass
class Workspace(Workload):
    """`layers` times such a convolution and ReLU on (batch_size, channels, image, image). One sample is one image."""

    sizes: ClassVar = {
        "cuda": {"batch_size": 32, "channels": 64, "image": 56},
        "cpu": {"batch_size": 2, "channels": 8, "image": 16},
    }

    mode: str = choice("forward")
    batch_size: int | None = None
    channels: int | None = None
    image: int | None = None
    layers: int = 4

    @property
    def samples(self) -> int:
        return known(self.batch_size)

    def model(self) -> nn.Module:
        channels = known(self.channels)
        return nn.Sequential(*(m for _ in range(self.layers) for m in (Unfolded(channels), nn.ReLU())))

    def batch(self, generator: torch.Generator) -> Batch:
        image = known(self.image)
        return (normal(generator, known(self.batch_size), known(self.channels), image, image),)
