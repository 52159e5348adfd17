"""Base of workloads that can train: an optimizer by name."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from optexp.program import Feed
from optexp.program.feeds import HostFeed
from optexp.schema import choice
from optexp.workload import Workload, sgd_or_adamw


@dataclass
class Learner(Workload):
    """Forward, forward and backward, or a whole training step; the last tensor of a batch is the loss's.

    source:  where batches lie: host memory is copied to the device in every step
    """

    mode: str = choice("forward_backward", "forward", "train")
    batch_size: int = 256
    optim: str = choice("adamw", "sgd")
    lr: float = 1e-3
    source: str = choice("device", "host")

    @property
    def samples(self) -> int:
        return self.batch_size

    @property
    def targets(self) -> int:
        return 0 if self.mode == "forward" else 1

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return sgd_or_adamw(self.optim, model, self.lr)

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        return super().feed(device, dtype) if self.source == "device" else HostFeed(device)
