"""A loop without a loader: indices are drawn inside, and the step is a block of it."""

import torch
from torch import nn

import optexp

torch.manual_seed(0)
xs = torch.linspace(-3, 3, 500).unsqueeze(1)
ys = torch.sin(xs)
model = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
step = 0
while step < 40:
    index = torch.randint(len(xs), (64,))
    x, y = xs[index], ys[index]
    with optexp.step(model=model, optimizer=optimizer):
        loss = (model(x) - y).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    step += 1
    if step % 20 == 0:
        print(step, loss.item())
