"""Matrix factorization with biases and dropout, on users, items and ratings."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import optexp


class Factors(nn.Module):
    def __init__(self, users, items, rank, dropout):
        super().__init__()
        self.users, self.items = nn.Embedding(users, rank), nn.Embedding(items, rank)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)
        self.dropout = nn.Dropout(dropout)

    def forward(self, user, item):
        product = (self.dropout(self.users(user)) * self.dropout(self.items(item))).sum(1)
        return product + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--dropout", type=float, default=0.2)
    args = parser.parse_args()
    torch.manual_seed(42)
    ratings = TensorDataset(torch.randint(50, (400,)), torch.randint(80, (400,)), torch.rand(400) * 4 + 1)
    model = Factors(50, 80, args.rank, args.dropout)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=1e-5)
    criterion = nn.MSELoss()
    for epoch in range(2):
        model.train()
        for user, item, rating in optexp.steps(DataLoader(ratings, 40, shuffle=True), model=model, optimizer=optimizer):
            prediction = model(user, item)
            loss = criterion(prediction, rating)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: {loss.item():.3f}")
