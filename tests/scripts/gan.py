"""A GAN: two networks, two optimizers, noise drawn in the loop."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import optexp

nz, batch_size = 8, 16
torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(nz, 32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
criterion = nn.BCEWithLogitsLoss()
optimizer_d = torch.optim.Adam(discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizer_g = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
dataloader = DataLoader(torch.rand(128, 16) * 2 - 1, batch_size=batch_size, shuffle=True)

for epoch in range(2):
    for i, real in enumerate(optexp.steps(dataloader, model=generator, optimizer=optimizer_g)):
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        fake = generator(torch.randn(len(real), nz))

        optimizer_d.zero_grad()
        d_loss = criterion(discriminator(real), ones) + criterion(discriminator(fake.detach()), zeros)
        d_loss.backward()
        optimizer_d.step()

        optimizer_g.zero_grad()
        g_loss = criterion(discriminator(fake), ones)
        g_loss.backward()
        optimizer_g.step()
        print(f"[{epoch}][{i}] Loss_D {d_loss.item():.3f} Loss_G {g_loss.item():.3f}")
