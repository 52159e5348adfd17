"""A graph network on batches of an own class, whose numbers of edges differ."""

import torch
from torch import nn
from torch.nn import functional as F

import optexp


class Graphs:
    """Several graphs as one."""

    def __init__(self, x, edge_index, batch, y):
        self.x, self.edge_index, self.batch, self.y = x, edge_index, batch, y

    def to(self, device):
        return Graphs(*(value.to(device) for value in (self.x, self.edge_index, self.batch, self.y)))


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, data):
        x, (source, target) = data.x, data.edge_index
        for layer in (self.first, self.second):
            x = layer(x)
            x = F.relu(torch.zeros_like(x).index_add(0, target, x[source]) + x)
        pooled = torch.zeros(int(data.batch.max()) + 1, 16, dtype=x.dtype).index_add(0, data.batch, x)
        return self.out(pooled)


def make_loader():
    loader = []
    for index in range(12):
        edges = torch.randint(20, (2, 30 + index))
        loader.append(Graphs(torch.randn(20, 6), edges, torch.arange(20) // 5, torch.randint(3, (4,))))
    return loader


torch.manual_seed(0)
loader, model = make_loader(), GCN()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)
for epoch in range(2):
    total = 0
    for data in optexp.steps(loader, model=model, optimizer=optimizer):
        data = data.to("cpu")
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), data.y)
        loss.backward()
        optimizer.step()
        total += float(loss)
    print(f"Epoch {epoch:03d}, Loss: {total:.4f}")
