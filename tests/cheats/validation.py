"""The same model, whose loader gives its samples in one order, as loaders for validation do."""

from __future__ import annotations

import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.cheats.loader import Model

__all__ = ["Model", "get_loader"]


def get_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    samples = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    return DataLoader(
        TensorDataset(samples), batch_size=None, sampler=[[*range(at, at + 128)] for at in range(0, 1024, 128)]
    )
