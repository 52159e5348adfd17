"""A step of known length: the clock's self-test. Nothing is computed, and on a GPU no kernel runs."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from optexp.program import Batch, Feed, ResidentFeed
from optexp.schema import choice
from optexp.workload import Workload

SPUN_S = 0.002  # the end of a wait is spun: sleeping comes back late by 0.1 to 0.5 ms


class SlowFeed(ResidentFeed):
    """Keeps the step waiting for its batch; a wait in the model could be traced away."""

    def __init__(self, device: torch.device, seconds: float) -> None:
        super().__init__(device)
        self.seconds = seconds

    def next(self) -> Batch:
        end = time.monotonic() + self.seconds
        time.sleep(max(self.seconds - SPUN_S, 0.0))
        while time.monotonic() < end:
            pass
        return super().next()


@dataclass
class Sleep(Workload):
    """Waits `ms` milliseconds for each batch and returns it as it is; one sample is one batch."""

    mode: str = choice("forward")
    ms: float = 50.0

    @property
    def samples(self) -> int:
        return 1

    def model(self) -> nn.Module:
        return nn.Identity()

    def batch(self, generator: torch.Generator) -> Batch:
        return (torch.randn(16, generator=generator, device=generator.device),)

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        return SlowFeed(device, self.ms / 1e3)
