"""Chunks from host memory to the device, through a network, and back: copies take as long as the work between them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from optexp.program import Batch, Feed
from optexp.program.feeds import HostFeed
from optexp.schema import choice
from optexp.transforms.chunked import Chunked
from optexp.workload import Workload, known


@dataclass
class Pipeline(Workload):
    """`layers` times Linear(dim, dim) and GELU on (rows, dim) in host memory. One sample is one row.

    pin_memory, non_blocking:  together, batches and results lie in page-locked memory, and copies are not waited for
    """

    sizes: ClassVar = {"cuda": {"rows": 65536, "dim": 1024}, "cpu": {"rows": 1024, "dim": 128}}

    mode: str = choice("forward")
    rows: int | None = None
    dim: int | None = None
    layers: int = 2
    chunks: int = 8
    pin_memory: bool = False
    non_blocking: bool = False

    def __post_init__(self) -> None:
        if self.chunks < 1:
            raise ValueError(f"chunks={self.chunks} must be at least 1")

    @property
    def samples(self) -> int:
        return known(self.rows)

    def model(self) -> nn.Module:
        dim = known(self.dim)
        return nn.Sequential(*(m for _ in range(self.layers) for m in (nn.Linear(dim, dim), nn.GELU())))

    def batch(self, generator: torch.Generator) -> Batch:
        shape = known(self.rows), known(self.dim)
        x: Tensor = torch.randn(shape, generator=generator, device=generator.device)
        return (x,)

    def feed(self, device: torch.device, dtype: torch.dtype) -> Feed:
        return HostFeed(device, self.pin_memory, self.non_blocking, delivers=False)

    def step(self) -> Chunked:
        return Chunked(self.chunks, self.non_blocking)
