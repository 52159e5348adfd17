"""Two tasks with a loader each, alternating, losses weighted by learned uncertainties."""

from itertools import cycle

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import optexp


class MultiTask(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Sequential(nn.Linear(10, 32), nn.ReLU())
        self.heads = nn.ModuleDict({"class": nn.Linear(32, 4), "value": nn.Linear(32, 1)})
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x, task):
        return self.heads[task](self.shared(x))


def main():
    torch.manual_seed(0)
    classes = DataLoader(TensorDataset(torch.randn(64, 10), torch.randint(4, (64,))), 16, shuffle=True)
    values = DataLoader(TensorDataset(torch.randn(48, 10), torch.randn(48, 1)), 16, shuffle=True)
    model = MultiTask()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=10_000)
    for epoch in range(2):
        for (x1, y1), (x2, y2) in optexp.steps(list(zip(classes, cycle(values))), model=model, optimizer=optimizer):
            first = nn.functional.cross_entropy(model(x1, "class"), y1)
            second = nn.functional.mse_loss(model(x2, "value"), y2)
            loss = (torch.stack([first, second]) * torch.exp(-model.log_vars) + model.log_vars).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheduler.step()


if __name__ == "__main__":
    main()
