"""Denoising diffusion: time steps and noise drawn in the loop, an averaged model beside it."""

import copy

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import optexp

T = 50
betas = torch.linspace(1e-4, 0.02, T)
alphas_cumprod = torch.cumprod(1 - betas, 0)


class Denoiser(nn.Module):
    def __init__(self, dim=16):
        super().__init__()
        self.time = nn.Embedding(T, 32)
        self.inner, self.outer = nn.Linear(dim, 32), nn.Linear(32, dim)

    def forward(self, x, t):
        return self.outer(F.silu(self.inner(x) + self.time(t)))


class EMA:
    def __init__(self, model, decay):
        self.shadow, self.decay = copy.deepcopy(model).requires_grad_(False), decay

    @torch.no_grad()
    def update(self, model):
        for kept, now in zip(self.shadow.parameters(), model.parameters(), strict=True):
            kept.lerp_(now, 1 - self.decay)


class Trainer:
    def __init__(self, model, loader):
        self.model, self.loader, self.ema = model, loader, EMA(model, 0.99)
        self.opt = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.step = 0

    def train(self):
        for x in optexp.steps(self.loader, model=self.model, optimizer=self.opt):
            t = torch.randint(0, T, (len(x),))
            noise = torch.randn_like(x)
            scale = alphas_cumprod[t].unsqueeze(1)
            predicted = self.model(scale.sqrt() * x + (1 - scale).sqrt() * noise, t)
            loss = F.mse_loss(predicted, noise)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.ema.update(self.model)
            self.step += 1


if __name__ == "__main__":
    torch.manual_seed(0)
    Trainer(Denoiser(), DataLoader(torch.randn(128, 16), batch_size=16, shuffle=True)).train()
