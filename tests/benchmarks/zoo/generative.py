"""Diffusion, autoencoders, flows and adversarial training."""

import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations


def timestep_embedding(timesteps, dim, max_period=10000):
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half, dtype=torch.float32) / half).to(timesteps.device)
    args = timesteps[:, None].float() * freqs[None]
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


class ResBlock(nn.Module):
    def __init__(self, channels, emb):
        super().__init__()
        self.in_layers = nn.Sequential(
            nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, channels, 3, padding=1)
        )
        self.emb_layers = nn.Sequential(nn.SiLU(), nn.Linear(emb, 2 * channels))
        self.norm = nn.GroupNorm(4, channels)
        self.out_layers = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x, emb):
        h = self.in_layers(x)
        scale, shift = self.emb_layers(emb).to(h.dtype)[..., None, None].chunk(2, dim=1)
        return x + self.out_layers(F.silu(self.norm(h) * (1 + scale) + shift))


class Denoiser(nn.Module):
    """A diffusion network: sinusoidal timesteps, scale and shift, group norm."""

    def __init__(self, channels=16):
        super().__init__()
        self.channels = channels
        self.time_embed = nn.Sequential(nn.Linear(channels, 32), nn.SiLU(), nn.Linear(32, 32))
        self.first = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(ResBlock(channels, 32) for _ in range(2))
        self.last = nn.Sequential(nn.GroupNorm(4, channels), nn.SiLU(), nn.Conv2d(channels, 3, 3, padding=1))

    def forward(self, x, timesteps):
        emb = timestep_embedding(timesteps, self.channels).to(x.dtype)
        emb = self.time_embed(emb)
        x = self.first(x)
        for block in self.blocks:
            x = block(x, emb)
        return self.last(x)


def denoiser_inputs():
    return [torch.randn(2, 3, 16, 16), torch.randint(0, 1000, (2,)), torch.randn(2, 3, 16, 16)]


def denoiser_loss(outputs, batch):
    return F.mse_loss(outputs, batch[2])


class DDIMStep(nn.Module):
    """A sampler's update: schedules of cumulative products gathered by timestep."""

    def __init__(self, steps=1000):
        super().__init__()
        betas = torch.linspace(1e-4, 0.02, steps)
        self.register_buffer("alphas_cumprod", torch.cumprod(1 - betas, dim=0))

    def forward(self, x, noise, t):
        a = self.alphas_cumprod[t].view(-1, 1, 1, 1)
        previous = self.alphas_cumprod[(t - 20).clamp(min=0)].view(-1, 1, 1, 1)
        x0 = ((x - (1 - a).sqrt() * noise) / a.sqrt()).clamp(-1, 1)
        return previous.sqrt() * x0 + (1 - previous).sqrt() * noise


def ddim_step_inputs():
    return [torch.randn(4, 3, 8, 8), torch.randn(4, 3, 8, 8), torch.randint(0, 1000, (4,))]


class VAE(nn.Module):
    """Reparameterisation with noise that the batch brings, so that a step is a function of its inputs."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(64, 32), nn.Linear(32, 8), nn.Linear(32, 8)
        self.fc3, self.fc4 = nn.Linear(8, 32), nn.Linear(32, 64)

    def forward(self, x, noise):
        h = F.relu(self.fc1(x))
        mu, logvar = self.fc21(h), self.fc22(h)
        z = mu + noise * torch.exp(0.5 * logvar)
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z)))), mu, logvar


def vae_inputs():
    return [torch.rand(16, 64), torch.randn(16, 8)]


def vae_loss(outputs, batch):
    reconstruction, mu, logvar = outputs
    bce = F.binary_cross_entropy(reconstruction, batch[0], reduction="sum")
    return bce - 0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())


class SampledVAE(VAE):
    """The same with noise drawn in forward."""

    def forward(self, x):
        return super().forward(x, torch.randn(len(x), 8, device=x.device, dtype=x.dtype))


def sampled_vae_inputs():
    return [torch.rand(16, 64)]


sampled_vae_loss = vae_loss


class VectorQuantizer(nn.Module):
    """The nearest code of a codebook, a straight-through gradient, commitment loss."""

    def __init__(self, codes=32, dim=8):
        super().__init__()
        self.encode = nn.Linear(16, dim)
        self.codebook = nn.Embedding(codes, dim)
        self.decode = nn.Linear(dim, 16)

    def forward(self, x):
        z = self.encode(x)
        distances = (z**2).sum(1, keepdim=True) + (self.codebook.weight**2).sum(1) - 2 * z @ self.codebook.weight.t()
        quantized = self.codebook(distances.argmin(1))
        loss = F.mse_loss(quantized.detach(), z) * 0.25 + F.mse_loss(quantized, z.detach())
        quantized = z + (quantized - z).detach()
        return F.mse_loss(self.decode(quantized), x) + loss


def vector_quantizer_inputs():
    return [torch.randn(32, 16)]


class ActNorm(nn.Module):
    """Glow's activation norm, with statistics of the first batch taken when `initialised` is still zero."""

    def __init__(self, channels):
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, channels))
        self.logs = nn.Parameter(torch.zeros(1, channels))
        self.register_buffer("initialised", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x):
        if self.training and not self.initialised:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0, keepdim=True))
                self.logs.copy_(-torch.log(x.std(0, keepdim=True) + 1e-6))
                self.initialised.fill_(1)
        return (x + self.loc) * self.logs.exp(), self.logs.sum()


class Flow(nn.Module):
    """RealNVP couplings between activation norms; negative log-likelihood."""

    def __init__(self, dim=6, depth=3):
        super().__init__()
        self.norms = nn.ModuleList(ActNorm(dim) for _ in range(depth))
        self.nets = nn.ModuleList(
            nn.Sequential(nn.Linear(dim // 2, 16), nn.ReLU(), nn.Linear(16, dim)) for _ in range(depth)
        )

    def forward(self, x):
        logdet = x.new_zeros(len(x))
        for norm, net in zip(self.norms, self.nets, strict=True):
            x, d = norm(x)
            a, b = x.chunk(2, 1)
            s, t = net(a).chunk(2, 1)
            s = torch.tanh(s)
            x = torch.cat([b * s.exp() + t, a], 1)
            logdet = logdet + s.sum(1) + d
        return (0.5 * (x**2 + math.log(2 * math.pi)).sum(1) - logdet).mean()


def flow_inputs():
    return [torch.randn(32, 6)]


class Discriminator(nn.Module):
    """Spectral norm; hinge loss over real and generated images that the batch brings."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            parametrizations.spectral_norm(nn.Conv2d(3, 8, 4, 2, 1)), nn.LeakyReLU(0.2),
            parametrizations.spectral_norm(nn.Conv2d(8, 16, 4, 2, 1)), nn.LeakyReLU(0.2),
            nn.Flatten(), parametrizations.spectral_norm(nn.Linear(16 * 16, 1)),
        )  # fmt: skip

    def forward(self, real, fake):
        return F.relu(1 - self.net(real)).mean() + F.relu(1 + self.net(fake)).mean()


def discriminator_inputs():
    return [torch.randn(4, 3, 16, 16), torch.randn(4, 3, 16, 16)]


class GAN(nn.Module):
    """Generator and discriminator in one module; a step updates both through one optimizer of two groups."""

    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 16), nn.Tanh())
        self.discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))

    def forward(self, noise):
        return self.generator(noise)


def gan_inputs():
    return [torch.randn(16, 8), torch.rand(16, 16) * 2 - 1]


def gan_optimizer(params):
    return torch.optim.Adam(params, lr=2e-4, betas=(0.5, 0.999))


def gan_train_step(model, batch, optimizer):
    noise, real = batch
    fake = model(noise)
    ones, zeros = torch.ones(len(real), 1, device=real.device), torch.zeros(len(real), 1, device=real.device)
    d_real, d_fake = model.discriminator(real), model.discriminator(fake.detach())
    loss_d = F.binary_cross_entropy_with_logits(d_real, ones.to(d_real.dtype))
    loss_d = loss_d + F.binary_cross_entropy_with_logits(d_fake, zeros.to(d_fake.dtype))
    loss_d.backward()
    for p in model.discriminator.parameters():
        p.requires_grad_(False)
    logits = model.discriminator(fake)
    loss_g = F.binary_cross_entropy_with_logits(logits, ones.to(logits.dtype))
    loss_g.backward()
    for p in model.discriminator.parameters():
        p.requires_grad_(True)
    optimizer.step()
    optimizer.zero_grad()
    return {"d": loss_d, "g": loss_g}


class StyleModulation(nn.Module):
    """StyleGAN2: modulated and demodulated weights, one group a sample; noise that the batch brings."""

    def __init__(self, inputs=8, outputs=8, style=12):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(outputs, inputs, 3, 3))
        self.affine = nn.Linear(style, inputs)
        self.strength = nn.Parameter(torch.tensor(0.1))

    def forward(self, x, style, noise):
        b, c, h, w = x.shape
        weight = self.weight[None] * (self.affine(style) + 1)[:, None, :, None, None]
        weight = weight * torch.rsqrt(weight.pow(2).sum((2, 3, 4), keepdim=True) + 1e-8)
        x = F.conv2d(x.reshape(1, b * c, h, w), weight.flatten(0, 1), padding=1, groups=b).view(b, -1, h, w)
        return F.leaky_relu(x + self.strength * noise, 0.2) * math.sqrt(2)


def style_modulation_inputs():
    return [torch.randn(2, 8, 8, 8), torch.randn(2, 12), torch.randn(2, 1, 8, 8)]


class NeRF(nn.Module):
    """Positional encoding, an MLP, and volume rendering by a cumulative product of transmittance."""

    def __init__(self, bands=4, width=32):
        super().__init__()
        self.register_buffer("bands", 2.0 ** torch.arange(bands))
        self.mlp = nn.Sequential(nn.Linear(3 + 6 * bands, width), nn.ReLU(), nn.Linear(width, 4))

    def forward(self, origins, directions):
        t = torch.linspace(0.5, 3.0, 16, device=origins.device, dtype=origins.dtype)
        points = origins[:, None] + directions[:, None] * t[:, None]
        scaled = points[..., None] * self.bands
        features = torch.cat([points, scaled.sin().flatten(2), scaled.cos().flatten(2)], -1)
        rgb, sigma = self.mlp(features).split([3, 1], -1)
        alpha = 1 - torch.exp(-F.relu(sigma.squeeze(-1)) * (t[1] - t[0]))
        transmittance = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], 1), 1)[:, :-1]
        return ((alpha * transmittance)[..., None] * torch.sigmoid(rgb)).sum(1)


def ne_rf_inputs():
    return [torch.randn(32, 3), F.normalize(torch.randn(32, 3), dim=-1)]


MODES = {"DDIMStep": ("forward",), "GAN": ("train",), "Flow": ("forward", "forward_backward", "train")}
