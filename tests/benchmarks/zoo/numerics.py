"""Losses, distances, orders and numbers of unusual size."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function


class InfoNCE(nn.Module):
    """Contrastive learning: normalised projections, a temperature, a symmetric cross-entropy (CLIP)."""

    def __init__(self, dim=16):
        super().__init__()
        self.image, self.text = nn.Linear(24, dim), nn.Linear(12, dim)
        self.logit_scale = nn.Parameter(torch.tensor(2.6592))

    def forward(self, image, text):
        a = F.normalize(self.image(image), dim=-1)
        b = F.normalize(self.text(text), dim=-1)
        logits = self.logit_scale.exp() * a @ b.t()
        labels = torch.arange(len(logits), device=logits.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2


def info_nce_inputs():
    return [torch.randn(32, 24), torch.randn(32, 12)]


class NTXent(nn.Module):
    """SimCLR: similarities of two views, the diagonal masked, logsumexp."""

    def __init__(self):
        super().__init__()
        self.projector = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, a, b, temperature=0.5):
        z = F.normalize(self.projector(torch.cat([a, b])), dim=1)
        similarity = z @ z.T / temperature
        similarity = similarity.masked_fill(torch.eye(len(z), dtype=torch.bool, device=z.device), -9e15)
        positive = torch.cat([similarity.diagonal(len(a)), similarity.diagonal(-len(a))])
        return (similarity.logsumexp(1) - positive).mean()


def nt_xent_inputs():
    return [torch.randn(16, 16), torch.randn(16, 16)]


class BarlowTwins(nn.Module):
    """Cross-correlation of batch-normalised embeddings, pulled towards the identity."""

    def __init__(self, dim=12):
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(inplace=True), nn.Linear(32, dim, bias=False)
        )
        self.bn = nn.BatchNorm1d(dim, affine=False)

    def forward(self, a, b):
        c = self.bn(self.net(a)).T @ self.bn(self.net(b)) / len(a)
        on_diagonal = torch.diagonal(c).add(-1).pow(2).sum()
        return on_diagonal + 0.0051 * (c.pow(2).sum() - torch.diagonal(c).pow(2).sum())


def barlow_twins_inputs():
    return [torch.randn(32, 20), torch.randn(32, 20)]


class TripletNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(20, 32), nn.PReLU(), nn.Linear(32, 8))

    def forward(self, anchor, positive, negative):
        return self.embed(anchor), self.embed(positive), self.embed(negative)


def triplet_net_inputs():
    return [torch.randn(24, 20) for _ in range(3)]


def triplet_net_loss(outputs, batch):
    return F.triplet_margin_loss(*outputs, margin=1.0, p=2)


class Prototypes(nn.Module):
    """Few-shot: class means of the support, minus squared distances as logits."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, support, query):
        prototypes = self.encode(support).mean(1)
        return F.log_softmax(-(torch.cdist(self.encode(query), prototypes) ** 2), dim=1)


def prototypes_inputs():
    return [torch.randn(5, 4, 12), torch.randn(30, 12), torch.randint(0, 5, (30,))]


def prototypes_loss(outputs, batch):
    return F.nll_loss(outputs, batch[2])


class GaussianKernel(nn.Module):
    """A kernel ridge regression with learned length scale: a Cholesky solve and a log-determinant."""

    def __init__(self):
        super().__init__()
        self.log_scale, self.log_noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-1.0))

    def forward(self, x, y):
        k = torch.exp(-0.5 * torch.cdist(x, x).square() / self.log_scale.exp() ** 2)
        k = k + self.log_noise.exp() * torch.eye(len(x), device=x.device, dtype=x.dtype)
        factor = torch.linalg.cholesky(k)
        alpha = torch.cholesky_solve(y, factor)
        return 0.5 * (y * alpha).sum() + factor.diagonal().log().sum()


def gaussian_kernel_inputs():
    return [torch.randn(24, 3), torch.randn(24, 1)]


class TopKSelect(nn.Module):
    """Beams: the best scores, where they are, and which class is first."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(16, 40)

    def forward(self, x):
        logits = self.score(x)
        top = logits.topk(5, dim=-1)
        return {"values": top.values, "indices": top.indices, "best": logits.argmax(-1)}


def top_k_select_inputs():
    return [torch.randn(24, 16)]


class SortedPooling(nn.Module):
    """Sorted features, a median, quantiles, and the mean of the upper half."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(10, 20)

    def forward(self, x):
        h, _ = self.lin(x).sort(dim=-1, descending=True)
        return torch.cat([h[:, :10].mean(1, keepdim=True), h.median(1, keepdim=True).values, h[:, ::5]], 1)


def sorted_pooling_inputs():
    return [torch.randn(16, 10)]


class CumulativeLink(nn.Module):
    """Ordinal regression: thresholds by a cumulative sum of softplus, differences of sigmoids, a log with eps."""

    def __init__(self, classes=5):
        super().__init__()
        self.net = nn.Linear(8, 1)
        self.gaps = nn.Parameter(torch.ones(classes - 1))

    def forward(self, x):
        thresholds = F.softplus(self.gaps).cumsum(0) - 2
        below = torch.sigmoid(thresholds - self.net(x))
        edges = torch.cat([torch.zeros_like(below[:, :1]), below, torch.ones_like(below[:, :1])], 1)
        return torch.log(edges.diff(dim=1).clamp(min=1e-8))


def cumulative_link_inputs():
    return [torch.randn(32, 8), torch.randint(0, 5, (32,))]


def cumulative_link_loss(outputs, batch):
    return F.nll_loss(outputs, batch[1])


class LargeScale(nn.Module):
    """Physics in SI units: pressures of 1e5, masses of 1e-27, distances of 1e8; a softened potential."""

    def __init__(self):
        super().__init__()
        self.correction = nn.Sequential(nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, position):
        metres = 1e8 * position
        d = metres[:, :, None] - metres[:, None]
        r2 = d.square().sum(-1) + 1e12
        force = (6.674e-11 * 5e24 * d / (r2 * r2.sqrt())[..., None]).sum(2)
        return force + 1e-3 * self.correction(position)


def large_scale_inputs():
    return [torch.randn(2, 10, 3)]


class TinyGradients(nn.Module):
    """A loss scaled by 1e-8, as sums over pixels that somebody divided twice give."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Softplus(), nn.Linear(32, 4))

    def forward(self, x):
        return self.net(x)


def tiny_gradients_inputs():
    return [torch.randn(32, 16), torch.randn(32, 4)]


def tiny_gradients_loss(outputs, batch):
    return F.mse_loss(outputs, batch[1], reduction="sum") * 1e-8


class Standardised(nn.Module):
    """Inputs standardised by their batch before a network: (x − mean) / (std + eps)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 24), nn.ELU(), nn.Linear(24, 3))

    def forward(self, x):
        return self.net((x - x.mean(0)) / (x.std(0) + 1e-5))


def standardised_inputs():
    return [1000 + 3 * torch.randn(64, 12)]


class EntropyLoss(nn.Module):
    """Distillation: KL divergence at a temperature, plus an entropy bonus with a constant eps."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = nn.Linear(16, 10), nn.Linear(16, 10)
        self.teacher.requires_grad_(False)

    def forward(self, x, temperature=4.0):
        s, t = self.student(x), self.teacher(x)
        kl = F.kl_div(F.log_softmax(s / temperature, 1), F.softmax(t / temperature, 1), reduction="batchmean")
        p = s.softmax(1)
        return kl * temperature**2 - 0.01 * -(p * torch.log(p + 1e-12)).sum(1).mean()


def entropy_loss_inputs():
    return [torch.randn(32, 16)]


class StraightThrough(Function):
    @staticmethod
    def forward(ctx, x):
        return torch.sign(x)

    @staticmethod
    def backward(ctx, grad):
        return grad


class BinaryNet(nn.Module):
    """Binarised weights and activations through a custom autograd.Function."""

    def __init__(self):
        super().__init__()
        self.fc1, self.bn, self.fc2 = nn.Linear(20, 32), nn.BatchNorm1d(32), nn.Linear(32, 5)

    def forward(self, x):
        h = F.linear(x, StraightThrough.apply(self.fc1.weight), self.fc1.bias)
        return self.fc2(StraightThrough.apply(torch.tanh(self.bn(h))))


def binary_net_inputs():
    return [torch.randn(32, 20)]


class SwishFunction(Function):
    """Memory-efficient swish with a backward by hand."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return grad * (s * (1 + x * (1 - s)))


class EfficientSwish(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(SwishFunction.apply(self.conv(x)).mean((2, 3)))


def efficient_swish_inputs():
    return [torch.randn(4, 3, 12, 12)]


class FakeQuantized(nn.Module):
    """Quantisation-aware training: per-tensor affine fake quantisation of weights with a straight-through gradient."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 32), nn.Linear(32, 4)

    @staticmethod
    def quantize(w):
        scale = w.detach().abs().max() / 127
        q = torch.clamp(torch.round(w / scale), -128, 127) * scale
        return w + (q - w).detach()

    def forward(self, x):
        h = F.relu(F.linear(x, self.quantize(self.fc1.weight), self.fc1.bias))
        return F.linear(h, self.quantize(self.fc2.weight), self.fc2.bias)


def fake_quantized_inputs():
    return [torch.randn(32, 16)]


class Int8Weights(nn.Module):
    """Weight-only quantisation for inference: int8 buffers, a scale a row, dequantised in forward."""

    def __init__(self):
        super().__init__()
        w = torch.randn(32, 24)
        scale = w.abs().amax(1, keepdim=True) / 127
        self.register_buffer("weight", torch.round(w / scale).to(torch.int8))
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(torch.zeros(32))

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype) * self.scale, self.bias)


def int8_weights_inputs():
    return [torch.randn(16, 24)]


class DynamicActivations(nn.Module):
    """Activations rounded to int8 steps by a scale of each row, then an integer-valued product."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 128, (16, 24)).float() / 127)

    def forward(self, x):
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-5) / 127
        return (torch.round(x / scale) @ self.weight.t()) * scale


def dynamic_activations_inputs():
    return [torch.randn(16, 24)]


class ComplexLinear(nn.Module):
    """Complex weights and activations, a modulus at the end."""

    def __init__(self, dim=12):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim, dtype=torch.cfloat) / dim**0.5)

    def forward(self, x):
        z = torch.complex(x, torch.sin(x)) @ self.weight
        return torch.abs(z) + z.real


def complex_linear_inputs():
    return [torch.randn(16, 12)]


class DtypeEps(nn.Module):
    """A log-probability with the epsilon of the dtype, as much library code writes it."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(16, 16)

    def forward(self, x, keep):
        p = self.lin(x).masked_fill(~keep, -1e4).softmax(-1)
        return (p + torch.finfo(p.dtype).eps).log()


def dtype_eps_inputs():
    return [torch.randn(16, 16), torch.rand(16, 16) < 0.8]


MODES = {
    "TopKSelect": ("forward",),
    "Int8Weights": ("forward",),
    "DynamicActivations": ("forward",),
    "SortedPooling": ("forward", "forward_backward"),
}
