"""Sub-pixel super-resolution, with functions train() and test() that use globals."""

import argparse
from math import log10

import torch
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

import optexp


class Net(nn.Module):
    def __init__(self, upscale_factor):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, 1, 2), nn.Conv2d(16, upscale_factor**2, 3, 1, 1)
        self.pixel_shuffle = nn.PixelShuffle(upscale_factor)

    def forward(self, x):
        return self.pixel_shuffle(self.conv2(torch.relu(self.conv1(x))))


parser = argparse.ArgumentParser(description="super-resolution")
parser.add_argument("--upscale_factor", type=int, required=True)
parser.add_argument("--lr", type=float, default=0.01)
opt = parser.parse_args()
torch.manual_seed(123)
images = torch.rand(32, 1, 8 * opt.upscale_factor, 8 * opt.upscale_factor)
data = TensorDataset(nn.functional.avg_pool2d(images, opt.upscale_factor), images)
training_data_loader = DataLoader(data, batch_size=4, shuffle=True)
model = Net(opt.upscale_factor)
criterion = nn.MSELoss()
optimizer = optim.Adam(model.parameters(), lr=opt.lr)


def train(epoch):
    epoch_loss = 0
    for iteration, batch in enumerate(optexp.steps(training_data_loader, model=model, optimizer=optimizer), 1):
        input, target = batch[0], batch[1]
        optimizer.zero_grad()
        loss = criterion(model(input), target)
        epoch_loss += loss.item()
        loss.backward()
        optimizer.step()
        print(f"===> Epoch[{epoch}]({iteration}/{len(training_data_loader)}): Loss: {loss.item():.4f}")


def test():
    with torch.no_grad():
        mse = criterion(model(data[:][0]), data[:][1])
    print(f"===> Avg. PSNR: {10 * log10(1 / mse.item()):.4f} dB")


for epoch in range(1, 3):
    train(epoch)
    test()
