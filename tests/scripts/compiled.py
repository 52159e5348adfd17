"""A script that compiles its model already, and reads its settings from a dataclass."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import DataLoader

import optexp


@dataclass
class Config:
    width: int = 32
    lr: float = 1e-2
    backend: str = "aot_eager"


def main(config: Config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, config.width), nn.GELU(), nn.Linear(config.width, 1))
    model = torch.compile(model, backend=config.backend)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9, nesterov=True)
    loader = DataLoader(torch.randn(64, 8), batch_size=16, drop_last=True)
    for epoch in range(2):
        for batch in optexp.steps(loader, model=model, optimizer=optimizer):
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()
        print(epoch, float(loss.detach()))


if __name__ == "__main__":
    main(Config())
