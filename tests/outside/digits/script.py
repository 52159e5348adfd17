"""A training script as people write them: nothing in it knows of optexp."""

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Dataset

ACCUMULATE = 2


class Digits(Dataset):
    def __init__(self):
        self.images, self.labels = load_digits(return_X_y=True)

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = torch.tensor(self.images[index], dtype=torch.float32).view(1, 8, 8) / 16
        return (image - image.mean()) / (image.std() + 1e-5), int(self.labels[index])


class Net(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Flatten())
        self.head = nn.Linear(64 * width, 10)

    def forward(self, images):
        features = self.body(images)
        return self.head(features), features


def smooth_and_sparse(outputs, labels):
    logits, features = outputs
    return F.cross_entropy(logits, labels, label_smoothing=0.1) + 1e-4 * features.abs().mean()


def main(epochs=2):
    torch.manual_seed(0)
    loader = DataLoader(Digits(), batch_size=32, shuffle=True, num_workers=2, drop_last=True)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    for epoch in range(epochs):
        for index, (images, labels) in enumerate(loader):
            loss = smooth_and_sparse(model(images), labels) / ACCUMULATE
            loss.backward()
            if (index + 1) % ACCUMULATE == 0:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        print(f"epoch {epoch}: loss {loss.item() * ACCUMULATE:.3f}")


if __name__ == "__main__":
    main()
