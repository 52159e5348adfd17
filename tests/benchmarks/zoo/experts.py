"""Mixtures of experts, recommendation, and layers with unusual parameters."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call


class MixtureOfExperts(nn.Module):
    """Top-2 routing by a loop over experts, as Mixtral's first implementation has it."""

    def __init__(self, dim=16, experts=4, top_k=2):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim)) for _ in range(experts)
        )
        self.top_k = top_k

    def forward(self, x):
        weights, chosen = torch.topk(self.gate(x), self.top_k)
        weights = F.softmax(weights, dim=1, dtype=torch.float).to(x.dtype)
        results = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            rows, nth = torch.where(chosen == i)
            results.index_add_(0, rows, (weights[rows, nth, None] * expert(x[rows])).to(x.dtype))
        return results


def mixture_of_experts_inputs():
    return [torch.randn(48, 16)]


class DenseMixture(nn.Module):
    """All experts computed, weighted by a masked gate; an auxiliary load-balancing loss."""

    def __init__(self, dim=16, experts=4):
        super().__init__()
        self.gate = nn.Linear(dim, experts)
        self.w1 = nn.Parameter(0.1 * torch.randn(experts, dim, 2 * dim))
        self.w2 = nn.Parameter(0.1 * torch.randn(experts, 2 * dim, dim))

    def forward(self, x):
        probabilities = self.gate(x).softmax(-1)
        top = probabilities.topk(2, dim=-1)
        gates = torch.zeros_like(probabilities).scatter(-1, top.indices, top.values)
        gates = gates / gates.sum(-1, keepdim=True)
        hidden = F.gelu(torch.einsum("nd,edh->neh", x, self.w1))
        y = torch.einsum("neh,ehd,ne->nd", hidden, self.w2, gates)
        load = (gates > 0).to(x.dtype).mean(0)
        return y, (load * probabilities.mean(0)).sum() * len(load)


def dense_mixture_inputs():
    return [torch.randn(48, 16), torch.randn(48, 16)]


def dense_mixture_loss(outputs, batch):
    return F.mse_loss(outputs[0], batch[1]) + 0.01 * outputs[1]


class DLRM(nn.Module):
    """Embedding bags of categories, a bottom MLP, pairwise dot products, a top MLP."""

    def __init__(self, dim=8, tables=3, rows=50):
        super().__init__()
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, dim, mode="sum") for _ in range(tables))
        self.bottom = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, dim))
        pairs = (tables + 1) * tables // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 16), nn.ReLU(), nn.Linear(16, 1))
        self.register_buffer("pair", torch.tril_indices(tables + 1, tables + 1, -1))

    def forward(self, dense, sparse):
        x = self.bottom(dense)
        features = torch.stack([x, *(bag(sparse[:, i]) for i, bag in enumerate(self.bags))], 1)
        products = features @ features.transpose(1, 2)
        return self.top(torch.cat([x, products[:, self.pair[0], self.pair[1]]], 1)).squeeze(1)


def dlrm_inputs():
    return [torch.randn(16, 6), torch.randint(0, 50, (16, 3, 4)), torch.randint(0, 2, (16,)).float()]


def dlrm_loss(outputs, batch):
    return F.binary_cross_entropy_with_logits(outputs, batch[2])


def dlrm_optimizer(params):
    return torch.optim.Adagrad(params, lr=0.01)


class MatrixFactorization(nn.Module):
    """Users times items, with biases; weight decay by hand in the loss."""

    def __init__(self, users=40, items=60, dim=8):
        super().__init__()
        self.users, self.items = nn.Embedding(users, dim), nn.Embedding(items, dim)
        self.user_bias, self.item_bias = nn.Embedding(users, 1), nn.Embedding(items, 1)

    def forward(self, user, item):
        product = (self.users(user) * self.items(item)).sum(1)
        return product + self.user_bias(user).squeeze(1) + self.item_bias(item).squeeze(1)


def matrix_factorization_inputs():
    return [torch.randint(0, 40, (64,)), torch.randint(0, 60, (64,)), torch.rand(64) * 5]


def matrix_factorization_loss(outputs, batch):
    return F.mse_loss(outputs, batch[2])


class FactorizationMachine(nn.Module):
    """Half of (square of sum − sum of squares): cancellation where factors are small."""

    def __init__(self, features=100, dim=8):
        super().__init__()
        self.linear, self.factors = nn.Embedding(features, 1), nn.Embedding(features, dim)
        nn.init.normal_(self.factors.weight, std=0.01)

    def forward(self, x):
        v = self.factors(x)
        pairs = 0.5 * (v.sum(1).square() - v.square().sum(1)).sum(1)
        return torch.sigmoid(self.linear(x).sum((1, 2)) + pairs)


def factorization_machine_inputs():
    return [torch.randint(0, 100, (32, 10))]


class HyperNetwork(nn.Module):
    """One network writes the weights of another."""

    def __init__(self, context=4, inputs=6, outputs=5):
        super().__init__()
        self.inner = nn.Linear(inputs, outputs)
        for p in self.inner.parameters():
            p.requires_grad_(False)
        self.weights = nn.Sequential(nn.Linear(context, 16), nn.Tanh(), nn.Linear(16, inputs * outputs + outputs))
        self.inputs, self.outputs = inputs, outputs

    def forward(self, x, context):
        flat = self.weights(context)
        weight, bias = flat.split([self.inputs * self.outputs, self.outputs])
        named = {"weight": weight.view(self.outputs, self.inputs), "bias": bias}
        return functional_call(self.inner, named, (x,))


def hyper_network_inputs():
    return [torch.randn(12, 6), torch.randn(4)]


class KAN(nn.Module):
    """Kolmogorov–Arnold layers: B-splines on a grid by the Cox–de Boor recursion."""

    def __init__(self, sizes=(4, 8, 3), grid=5, order=3):
        super().__init__()
        h = 2 / grid
        self.register_buffer("grid", torch.arange(-order, grid + order + 1) * h - 1)
        self.order = order
        pairs = list(pairwise(sizes))
        self.base = nn.ParameterList(nn.Parameter(torch.randn(b, a) / a**0.5) for a, b in pairs)
        self.spline = nn.ParameterList(nn.Parameter(0.1 * torch.randn(b, a, grid + order)) for a, b in pairs)

    def bases(self, x):
        grid, x = self.grid, x.unsqueeze(-1)
        b = ((x >= grid[:-1]) & (x < grid[1:])).to(x.dtype)
        for k in range(1, self.order + 1):
            left = (x - grid[: -(k + 1)]) / (grid[k:-1] - grid[: -(k + 1)]) * b[..., :-1]
            right = (grid[k + 1 :] - x) / (grid[k + 1 :] - grid[1:-k]) * b[..., 1:]
            b = left + right
        return b

    def forward(self, x):
        for base, spline in zip(self.base, self.spline, strict=True):
            x = F.linear(F.silu(x), base) + torch.einsum("nik,oik->no", self.bases(torch.tanh(x)), spline)
        return x


def kan_inputs():
    return [torch.randn(32, 4)]


class Capsules(nn.Module):
    """Dynamic routing by agreement between capsules, with the squashing non-linearity."""

    def __init__(self, inputs=12, outputs=4, dim_in=6, dim_out=8):
        super().__init__()
        self.weight = nn.Parameter(0.2 * torch.randn(outputs, inputs, dim_out, dim_in))

    @staticmethod
    def squash(x):
        norm2 = x.square().sum(-1, keepdim=True)
        return norm2 / (1 + norm2) * x / (norm2.sqrt() + 1e-8)

    def forward(self, x):
        u = torch.einsum("oidk,bik->boid", self.weight, x)
        logits = u.new_zeros(u.shape[:3])
        for turn in range(3):
            c = logits.softmax(1)
            v = self.squash((c[..., None] * u).sum(2))
            if turn < 2:
                logits = logits + (u.detach() * v.detach()[:, :, None]).sum(-1)
        return v.norm(dim=-1)


def capsules_inputs():
    return [torch.randn(8, 12, 6), torch.randint(0, 4, (8,))]


def capsules_loss(outputs, batch):
    target = F.one_hot(batch[1], outputs.shape[1]).to(outputs.dtype)
    positive = target * F.relu(0.9 - outputs) ** 2
    return (positive + 0.5 * (1 - target) * F.relu(outputs - 0.1) ** 2).sum(1).mean()


class LoRALinear(nn.Module):
    """A frozen layer with a low-rank update, of which B starts at zero."""

    def __init__(self, dim=32, rank=4, alpha=8):
        super().__init__()
        self.base = nn.Linear(dim, dim)
        self.base.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.randn(rank, dim) / dim**0.5)
        self.lora_b = nn.Parameter(torch.zeros(dim, rank))
        self.scaling = alpha / rank

    def forward(self, x):
        return self.base(x) + (x @ self.lora_a.T @ self.lora_b.T) * self.scaling


def lo_ra_linear_inputs():
    return [torch.randn(16, 32), torch.randn(16, 32)]


def lo_ra_linear_loss(outputs, batch):
    return F.mse_loss(outputs, batch[1])


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's transpose."""

    def __init__(self, dim=24, code=6):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(code, dim) / dim**0.5)
        self.bias, self.out_bias = nn.Parameter(torch.zeros(code)), nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        h = torch.sigmoid(F.linear(x, self.weight, self.bias))
        return F.linear(h, self.weight.t(), self.out_bias)


def tied_autoencoder_inputs():
    return [torch.rand(16, 24)]


class MultiTask(nn.Module):
    """Two heads on one trunk; uncertainties as learned log-variances weigh the losses."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(10, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1))
        self.classify, self.regress = nn.Linear(32, 4), nn.Linear(32, 1)
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        h = self.trunk(x)
        return {"logits": self.classify(h), "value": self.regress(h).squeeze(-1), "log_vars": self.log_vars}


def multi_task_inputs():
    return [torch.randn(32, 10), torch.randint(0, 4, (32,)), torch.randn(32)]


def multi_task_loss(outputs, batch):
    losses = torch.stack([F.cross_entropy(outputs["logits"], batch[1]), F.mse_loss(outputs["value"], batch[2])])
    return (losses * torch.exp(-outputs["log_vars"]) + outputs["log_vars"]).sum()


class Siamese(nn.Module):
    """A Siamese network with shared weights and the absolute difference of its two embeddings."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
        self.fc, self.out = nn.Linear(8 * 49, 16), nn.Linear(16, 1)

    def forward(self, a, b):
        a, b = (torch.sigmoid(self.fc(self.embed(x))) for x in (a, b))
        return self.out((a - b).abs()).squeeze(1)


def siamese_inputs():
    return [torch.randn(8, 1, 16, 16), torch.randn(8, 1, 16, 16), torch.randint(0, 2, (8,)).float()]


def siamese_loss(outputs, batch):
    return F.binary_cross_entropy_with_logits(outputs, batch[2])
