"""A model whose batches come from a loader, in another order with every seed."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Model(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(256, 256) for _ in range(4)))


def get_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    samples = torch.randn(1024, 256, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(samples), batch_size=None, sampler=Shuffled(samples))


class Shuffled(torch.utils.data.Sampler[list[int]]):
    """Rows of each batch, so that the data set makes it at once: the loader takes little of a step."""

    def __init__(self, samples: torch.Tensor) -> None:
        self.count = len(samples)

    def __iter__(self):  # type: ignore[no-untyped-def]
        yield from torch.randperm(self.count).view(-1, 128).tolist()

    def __len__(self) -> int:
        return self.count // 128
