"""Volumes, ensembles and other layers that the themes beside this file leave out."""

import torch
import torch.nn.functional as F
from torch import nn


class VideoNet(nn.Module):
    """(2+1)D convolutions over clips, each with a bias before BatchNorm."""

    def __init__(self):
        super().__init__()
        self.spatial, self.bn1 = nn.Conv3d(3, 8, (1, 3, 3), padding=(0, 1, 1)), nn.BatchNorm3d(8)
        self.temporal, self.bn2 = nn.Conv3d(8, 8, (3, 1, 1), padding=(1, 0, 0)), nn.BatchNorm3d(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = F.relu(self.bn1(self.spatial(x)))
        x = F.relu(self.bn2(self.temporal(x)))
        return self.fc(F.adaptive_avg_pool3d(x, 1).flatten(1))


def video_net_inputs():
    return [torch.randn(2, 3, 4, 12, 12), torch.randint(0, 4, (2,))]


def video_net_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


class DeepEnsemble(nn.Module):
    """Members as batched matrices; the mean and variance of their predictions."""

    def __init__(self, members=4, dim=10):
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(members, dim, 16) / dim**0.5)
        self.b1 = nn.Parameter(torch.zeros(members, 1, 16))
        self.w2 = nn.Parameter(torch.randn(members, 16, 1) / 4)

    def forward(self, x):
        h = torch.relu(torch.baddbmm(self.b1, x.expand(len(self.w1), *x.shape), self.w1))
        y = torch.bmm(h, self.w2).squeeze(-1)
        return y.mean(0), y.var(0)


def deep_ensemble_inputs():
    return [torch.randn(24, 10)]


class GatedFusion(nn.Module):
    """Two modalities, a bilinear product, gates, and a maxout."""

    def __init__(self):
        super().__init__()
        self.bilinear = nn.Bilinear(6, 5, 12)
        self.gate = nn.Linear(11, 12)
        self.out = nn.Linear(12, 8)

    def forward(self, a, b):
        h = self.bilinear(a, b) * torch.sigmoid(self.gate(torch.cat([a, b], 1)))
        return self.out(F.layer_norm(h, (12,))).view(len(a), 4, 2).amax(-1)


def gated_fusion_inputs():
    return [torch.randn(20, 6), torch.randn(20, 5)]


class Equilibrium(nn.Module):
    """A deep equilibrium layer: twelve fixed-point iterations of a contraction."""

    def __init__(self, dim=12):
        super().__init__()
        self.inner, self.outer = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.inner.weight.data.mul_(0.3)

    def forward(self, x):
        z = torch.zeros_like(x)
        for _ in range(12):
            z = torch.tanh(self.inner(z) + self.outer(x))
        return z


def equilibrium_inputs():
    return [torch.randn(16, 12)]


class NeuralODE(nn.Module):
    """Runge–Kutta of fourth order over a fixed grid, stiff enough that errors grow."""

    def __init__(self, dim=4):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(dim, 24), nn.Tanh(), nn.Linear(24, dim))

    def forward(self, y, dt=0.1):
        for _ in range(10):
            k1 = self.field(y)
            k2 = self.field(y + dt / 2 * k1)
            k3 = self.field(y + dt / 2 * k2)
            k4 = self.field(y + dt * k3)
            y = y + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return y


def neural_ode_inputs():
    return [torch.randn(16, 4)]


class ConvTasNet(nn.Module):
    """Time-domain separation: an encoder and decoder by strided convolutions, global layer norm, masks by sigmoid."""

    def __init__(self, filters=16, speakers=2):
        super().__init__()
        self.encoder = nn.Conv1d(1, filters, 8, stride=4, bias=False)
        self.norm = nn.GroupNorm(1, filters, eps=1e-8)
        self.bottleneck = nn.Conv1d(filters, filters, 1)
        self.depthwise = nn.Conv1d(filters, filters, 3, padding=2, dilation=2, groups=filters)
        self.prelu = nn.PReLU()
        self.mask = nn.Conv1d(filters, speakers * filters, 1)
        self.decoder = nn.ConvTranspose1d(filters, 1, 8, stride=4, bias=False)
        self.speakers = speakers

    def forward(self, mixture):
        w = F.relu(self.encoder(mixture[:, None]))
        m = torch.sigmoid(self.mask(self.prelu(self.depthwise(self.bottleneck(self.norm(w))))))
        masked = m.view(len(w), self.speakers, *w.shape[1:]) * w[:, None]
        return self.decoder(masked.flatten(0, 1)).view(len(w), self.speakers, -1)


def conv_tas_net_inputs():
    return [torch.randn(2, 256), torch.randn(2, 2, 256)]


def conv_tas_net_loss(outputs, batch):
    target = batch[1] - batch[1].mean(-1, keepdim=True)
    estimate = outputs - outputs.mean(-1, keepdim=True)
    scale = (estimate * target).sum(-1, keepdim=True) / (target.square().sum(-1, keepdim=True) + 1e-8)
    projection = scale * target
    noise = estimate - projection
    return -10 * torch.log10(projection.square().sum(-1) / (noise.square().sum(-1) + 1e-8) + 1e-8).mean()


class BatchRenormalised(nn.Module):
    """A custom batch norm in plain tensor code: mean and variance of the batch, running averages in buffers."""

    def __init__(self, channels=12):
        super().__init__()
        self.lin = nn.Linear(8, channels)
        self.gamma, self.beta = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x):
        h = self.lin(x)
        if self.training:
            mean, var = h.mean(0), h.var(0, unbiased=False)
            with torch.no_grad():
                self.running_mean.lerp_(mean.to(self.running_mean.dtype), 0.1)
                self.running_var.lerp_(var.to(self.running_var.dtype), 0.1)
        else:
            mean, var = self.running_mean, self.running_var
        return self.gamma * (h - mean) / torch.sqrt(var + 1e-5) + self.beta


def batch_renormalised_inputs():
    return [torch.randn(32, 8), torch.randn(32, 12)]


def batch_renormalised_loss(outputs, batch):
    return F.smooth_l1_loss(outputs, batch[1])


class Wide(nn.Module):
    """A memory-bound chain in a function of its own: scores, softcap, masks by where, a dropout of probability 0."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.7))

    def forward(self, x, mask):
        y = 30 * torch.tanh(x * self.scale / 30)
        y = torch.where(mask, y, torch.full_like(y, -1e30))
        return F.dropout(y.softmax(-1), 0.0, self.training)


def wide_inputs():
    return [3 * torch.randn(32, 64), torch.rand(32, 64) < 0.9]
