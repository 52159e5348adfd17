"""Gradient accumulation by a counter, clipping, and a schedule that is stepped with the optimizer."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import optexp

ACCUMULATION = 4


def main():
    torch.manual_seed(0)
    data = TensorDataset(torch.randn(256, 12), torch.randn(256, 1))
    train_dataloader = DataLoader(data, batch_size=8, shuffle=True)
    model = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.1, 1 - step / 100))
    completed_steps = 0
    for epoch in range(2):
        loop = optexp.steps(train_dataloader, model=model, optimizer=optimizer, every=ACCUMULATION)
        for step, (inputs, targets) in enumerate(loop):
            loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATION
            loss.backward()
            if (step + 1) % ACCUMULATION == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
                completed_steps += 1
        print(epoch, completed_steps, lr_scheduler.get_last_lr())


if __name__ == "__main__":
    main()
