"""A denoising autoencoder whose loop is a method, with a progress bar of its own around the loader."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import optexp


def progress_bar(batches, total):
    for count, batch in enumerate(batches, 1):
        yield batch
        print(f"\r{count}/{total}", end="")


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU())
        self.decoder = nn.Sequential(nn.ConvTranspose2d(4, 1, 2, stride=2), nn.Sigmoid())

    def forward(self, x):
        return self.decoder(self.encoder(x))


class Experiment:
    def __init__(self):
        torch.manual_seed(0)
        self.net = Autoencoder()
        self.optim = torch.optim.Adam(self.net.parameters(), weight_decay=1e-5)
        self.loader = DataLoader(torch.rand(64, 1, 8, 8), batch_size=8, shuffle=True)
        self.history = []

    def run(self):
        for image in progress_bar(optexp.steps(self.loader, model=self.net, optimizer=self.optim), len(self.loader)):
            noisy = image + 0.1 * torch.randn_like(image)
            loss = nn.functional.mse_loss(self.net(noisy), image)
            self.optim.zero_grad()
            loss.backward()
            self.optim.step()
            self.history.append(loss.item())


Experiment().run()
