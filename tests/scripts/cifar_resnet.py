"""A small ResNet on images, in the manner of CIFAR repositories: train() and test() per epoch, cosine schedule."""

import argparse

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import optexp


class Images(Dataset):
    def __init__(self, count):
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(count, 3, 8, 8, generator=generator)
        self.labels = torch.randint(10, (count,), generator=generator)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class BasicBlock(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)
        self.conv2, self.bn2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x):
        return F.relu(x + self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))))


parser = argparse.ArgumentParser()
parser.add_argument("--lr", default=0.1, type=float)
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
trainloader = DataLoader(Images(64), batch_size=16, shuffle=True, num_workers=0, drop_last=True)
net = nn.Sequential(
    nn.Conv2d(3, 8, 3, padding=1), BasicBlock(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
)
net = net.to(device)
criterion = nn.CrossEntropyLoss()
optimizer = optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, weight_decay=5e-4)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=2)


def train(epoch):
    net.train()
    train_loss, correct, total = 0, 0, 0
    for batch_idx, (inputs, targets) in enumerate(optexp.steps(trainloader, model=net, optimizer=optimizer)):
        inputs, targets = inputs.to(device), targets.to(device)
        optimizer.zero_grad()
        outputs = net(inputs)
        loss = criterion(outputs, targets)
        loss.backward()
        optimizer.step()
        train_loss += loss.item()
        _, predicted = outputs.max(1)
        total += targets.size(0)
        correct += predicted.eq(targets).sum().item()
        print(batch_idx, f"Loss: {train_loss / (batch_idx + 1):.3f} | Acc: {100.0 * correct / total:.1f}%")


for epoch in range(2):
    train(epoch)
    scheduler.step()
