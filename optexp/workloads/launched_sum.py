"""The sum of two vectors by a kernel whose launch configuration is chosen."""

from __future__ import annotations

from importlib import import_module

from torch import Tensor, nn

from optexp.kernelkit import extension


class Launched(nn.Module):
    """The sum by a grid-stride loop in CUDA C++, with a grid and a block of one's choice."""

    def __init__(self, blocks: int, threads: int) -> None:
        super().__init__()
        self.blocks, self.threads = blocks, threads

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        if not extension.takes(a, b):  # float64, as a reference computes
            return a + b
        launched = import_module("optexp.kernels.add").launched
        total: Tensor = launched(a.contiguous(), b.contiguous(), self.blocks, self.threads)
        return total
