"""A siamese network with a triplet loss; the data set draws the triplets."""

import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import optexp


class Triplets(Dataset):
    def __init__(self, count=96):
        generator = torch.Generator().manual_seed(3)
        self.labels = torch.randint(6, (count,), generator=generator)
        self.points = torch.randn(count, 10, generator=generator) + self.labels.unsqueeze(1)

    def __len__(self):
        return len(self.points)

    def pick(self, same):
        return self.points[random.choice(same.nonzero().flatten().tolist())]

    def __getitem__(self, index):
        same = self.labels == self.labels[index]
        return self.points[index], self.pick(same), self.pick(~same)


class Embedding(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(10, 32), nn.PReLU(), nn.Linear(32, 2))

    def forward(self, x):
        return nn.functional.normalize(self.net(x), dim=1)


def main():
    random.seed(0)
    torch.manual_seed(0)
    model, criterion = Embedding(), nn.TripletMarginLoss(margin=0.5)
    optimizer = torch.optim.RMSprop(model.parameters(), lr=1e-3)
    loader = DataLoader(Triplets(), batch_size=12, shuffle=True)
    losses = []
    for anchor, positive, negative in optexp.steps(loader, model=model, optimizer=optimizer):
        optimizer.zero_grad()
        loss = criterion(model(anchor), model(positive), model(negative))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    print(sum(losses) / len(losses))


if __name__ == "__main__":
    main()
