"""Training as people write it: averages of weights, schedules, clipping, accumulation, mixed losses, Python state."""

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class EMATeacher(nn.Module):
    """Mean teacher (BYOL): a copy that follows by an exponential average after each step."""

    def __init__(self, dim=16, momentum=0.99):
        super().__init__()
        self.online = nn.Sequential(nn.Linear(dim, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 8))
        self.predictor = nn.Linear(8, 8)
        self.target = copy.deepcopy(self.online)
        self.target.requires_grad_(False)
        self.momentum = momentum

    @torch.no_grad()
    def update(self):
        for online, target in zip(self.online.parameters(), self.target.parameters(), strict=True):
            target.mul_(self.momentum).add_(online, alpha=1 - self.momentum)

    def forward(self, a, b):
        prediction = F.normalize(self.predictor(self.online(a)), dim=1)
        with torch.no_grad():
            goal = F.normalize(self.target(b), dim=1)
        return 2 - 2 * (prediction * goal).sum(1).mean()


def ema_teacher_inputs():
    return [torch.randn(32, 16), torch.randn(32, 16)]


def ema_teacher_train_step(model, batch, optimizer):
    optimizer.zero_grad()
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    model.update()
    return loss


def ema_teacher_optimizer(params):
    return torch.optim.SGD([p for p in params if p.requires_grad], lr=0.05, momentum=0.9)


class TabularNet(nn.Module):
    """Categories and numbers of a table; a DataLoader; OneCycle-like warm-up inside the step."""

    def __init__(self):
        super().__init__()
        self.embeds = nn.ModuleList(nn.Embedding(n, 4) for n in (5, 7, 11))
        self.bn = nn.BatchNorm1d(6)
        self.net = nn.Sequential(nn.Linear(18, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 1))

    def forward(self, categories, numbers):
        x = torch.cat([embed(categories[:, i]) for i, embed in enumerate(self.embeds)], 1)
        return self.net(torch.cat([x, self.bn(numbers)], 1)).squeeze(1)


def tabular_net_loader():
    g = torch.Generator().manual_seed(0)
    categories = torch.stack([torch.randint(0, n, (512,), generator=g) for n in (5, 7, 11)], 1)
    numbers = torch.randn(512, 6, generator=g)
    target = numbers.sum(1) + 0.1 * categories[:, 0]
    return DataLoader(TensorDataset(categories, numbers, target), batch_size=64, shuffle=True, drop_last=True)


def tabular_net_loss(outputs, batch):
    return F.mse_loss(outputs, batch[2])


class Accumulating(nn.Module):
    """Four micro-batches, gradients clipped by norm, a schedule stepped after each optimizer step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(12, 48), nn.GELU(), nn.LayerNorm(48), nn.Linear(48, 6))

    def forward(self, x):
        return self.net(x)


def accumulating_inputs():
    return [torch.randn(32, 12), torch.randint(0, 6, (32,))]


def accumulating_optimizer(params):
    return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.05)


def accumulating_train_step(model, batch, optimizer):
    losses = []
    for x, y in zip(*(part.chunk(4) for part in batch), strict=True):
        loss = F.cross_entropy(model(x), y, label_smoothing=0.1)
        (loss / 4).backward()
        losses.append(loss.detach())
    nn.utils.clip_grad_norm_(model.parameters(), max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()
    return torch.stack(losses).mean()


class AnnealedVAE(nn.Module):
    """The weight of a regulariser grows with a Python counter of calls."""

    def __init__(self, width=16):
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        beta = min(1.0, self.calls / 10)
        h = torch.tanh(self.first(x))
        return self.second(h).square().mean() + beta * h.square().mean()


def annealed_vae_inputs():
    return [torch.randn(16, 16)]


class StepCounter(nn.Module):
    """A counter as a buffer, and a running mean of what was seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(10))
        self.lin = nn.Linear(10, 4)

    def forward(self, x):
        if self.training:
            self.steps += 1
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        return self.lin(x - self.mean)


def step_counter_inputs():
    return [torch.randn(24, 10), torch.randint(0, 4, (24,))]


def step_counter_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


class MixUp(nn.Module):
    """MixUp with a ratio that the batch brings, and a convolution with bias before BatchNorm."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(4), nn.Flatten(), nn.Linear(72, 5)
        )

    def forward(self, x):
        return self.net(x)


def mix_up_inputs():
    return [torch.randn(8, 3, 12, 12), torch.randint(0, 5, (8,)), torch.rand(1)]


def mix_up_train_step(model, batch, optimizer):
    x, y, ratio = batch
    other = x.flip(0)
    optimizer.zero_grad()
    logits = model(ratio * x + (1 - ratio) * other)
    loss = ratio * F.cross_entropy(logits, y) + (1 - ratio) * F.cross_entropy(logits, y.flip(0))
    loss = loss.mean()
    loss.backward()
    optimizer.step()
    return loss


class PolicyGradient(nn.Module):
    """PPO's clipped surrogate with advantages standardised in the loss, a value loss and an entropy bonus."""

    def __init__(self, observations=8, actions=4):
        super().__init__()
        self.actor = nn.Sequential(nn.Linear(observations, 32), nn.Tanh(), nn.Linear(32, actions))
        self.critic = nn.Sequential(nn.Linear(observations, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, observation):
        return self.actor(observation), self.critic(observation).squeeze(-1)


def policy_gradient_inputs():
    return [
        torch.randn(64, 8),
        torch.randint(0, 4, (64,)),
        torch.randn(64),
        torch.randn(64),
        -1.4 + 0.1 * torch.randn(64),
    ]


def policy_gradient_loss(outputs, batch):
    logits, value = outputs
    _, action, advantage, returns, old = batch
    advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
    log_probability = logits.log_softmax(-1)
    chosen = log_probability.gather(1, action[:, None]).squeeze(1)
    ratio = (chosen - old).exp()
    surrogate = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    entropy = -(log_probability.exp() * log_probability).sum(-1).mean()
    return -surrogate + 0.5 * F.mse_loss(value, returns) - 0.01 * entropy


class QLearning(nn.Module):
    """A double Q-network: the bootstrap from a frozen copy, Huber loss."""

    def __init__(self):
        super().__init__()
        self.q = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.Linear(32, 3))
        self.frozen = copy.deepcopy(self.q).requires_grad_(False)

    def forward(self, state, following, action, reward):
        q = self.q(state).gather(1, action[:, None]).squeeze(1)
        with torch.no_grad():
            best = self.q(following).argmax(1, keepdim=True)
            target = reward + 0.99 * self.frozen(following).gather(1, best).squeeze(1)
        return F.smooth_l1_loss(q, target)


def q_learning_inputs():
    return [torch.randn(32, 6), torch.randn(32, 6), torch.randint(0, 3, (32,)), torch.randn(32)]


class PhysicsInformed(nn.Module):
    """A PINN: second derivatives of the network by autograd inside the loss (Burgers' equation)."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, points):
        with torch.enable_grad():
            points = points.detach().requires_grad_()
            u = self.net(points)
            (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
            (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        return (first[:, 1:] + u * first[:, :1] - 0.01 / 3.1416 * second[:, :1]).square().mean()


def physics_informed_inputs():
    return [torch.rand(64, 2)]


class FeatureWise(nn.Module):
    """FiLM conditioning over instance norm, a bias that the norm cancels, and a ReLU6."""

    def __init__(self, channels=8, condition=5):
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1)
        self.norm = nn.InstanceNorm2d(channels)
        self.film = nn.Linear(condition, 2 * channels)

    def forward(self, x, condition):
        gamma, beta = self.film(condition)[..., None, None].chunk(2, 1)
        return F.relu6((1 + gamma) * self.norm(self.conv(x)) + beta)


def feature_wise_inputs():
    return [torch.randn(4, 3, 12, 12), torch.randn(4, 5)]


class OwnOptimizers(nn.Module):
    """Sparse embeddings and dense layers: the first step makes an optimizer of each, and a schedule."""

    def __init__(self, rows=200, dim=16):
        super().__init__()
        self.rows = nn.EmbeddingBag(rows, dim, sparse=True, mode="mean")
        self.layers = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, 4))

    def forward(self, ids):
        return self.layers(self.rows(ids))


class Optimizers:
    def __init__(self, model):
        self.sparse = torch.optim.SparseAdam(model.rows.parameters(), lr=1e-2)
        self.dense = torch.optim.AdamW(model.layers.parameters(), lr=1e-3)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.dense, 100)

    def step(self):
        self.sparse.step()
        self.dense.step()
        self.schedule.step()


own = {}


def own_optimizers_inputs():
    return [torch.randint(200, (32, 8)), torch.randint(4, (32,))]


def own_optimizers_train_step(model, batch, optimizer):
    if "optimizers" not in own:
        own["optimizers"] = Optimizers(model)
    model.zero_grad()
    loss = F.cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    own["optimizers"].step()
    return loss


class NestedBatch(nn.Module):
    """A model that takes its batch as one dict, with lists in it."""

    def __init__(self, dim=16):
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(dim, 32) for _ in range(2))
        self.head = nn.Linear(32, 4)

    def forward(self, batch):
        return self.head(sum(F.gelu(layer(x)) for layer, x in zip(self.parts, batch["views"], strict=True)))


def nested_batch_inputs():
    return [{"views": [torch.randn(32, 16), torch.randn(32, 16)], "name": "two"}, torch.randint(4, (32,))]


def nested_batch_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


class CentreLoss(nn.Module):
    """A model beside centres of classes that are no part of it: one optimizer trains both, clipped in one norm."""

    def __init__(self, dim=12, classes=4):
        super().__init__()
        self.head = nn.Linear(8, classes)  # its forward takes them in another order
        self.body = nn.Sequential(nn.Linear(dim, 24), nn.ReLU(), nn.Linear(24, 8))

    def forward(self, x):
        features = self.body(x) + 1
        return self.head(features), features


centres = nn.Embedding.from_pretrained(torch.eye(4, 8), freeze=False)


def centre_loss_inputs():
    return [torch.randn(32, 12), torch.randint(0, 4, (32,))]


def centre_loss_optimizer(params):
    return torch.optim.SGD([*params, *centres.parameters()], lr=0.05, momentum=0.9)


def centre_loss_train_step(model, batch, optimizer):
    optimizer.zero_grad()
    logits, features = model(batch[0])
    distance = (features - centres(batch[1]).to(features.dtype)).square().sum(1).mean()
    loss = F.cross_entropy(logits, batch[1]) + 0.1 * distance
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss


class RegisteredMean(nn.Module):
    """A running mean that the first forward registers as a buffer."""

    def __init__(self, dim=12):
        super().__init__()
        self.first, self.second = nn.Linear(dim, 16), nn.Linear(16, 4)

    def forward(self, x):
        hidden = F.gelu(self.first(x))
        mean = hidden.detach().float().mean(0) if hidden.dtype is torch.bfloat16 else hidden.detach().mean(0)
        if hasattr(self, "mean"):
            self.mean = 0.9 * self.mean + 0.1 * mean
        else:
            self.register_buffer("mean", mean)
        return self.second(hidden - self.mean)


def registered_mean_inputs():
    return [torch.randn(16, 12), torch.randint(0, 4, (16,))]


def registered_mean_loss(outputs, batch):
    return F.cross_entropy(outputs, batch[1])


MODES = {
    "CentreLoss": ("train",),
    "EMATeacher": ("train",),
    "OwnOptimizers": ("forward", "train"),
    "Accumulating": ("forward", "train"),
    "MixUp": ("forward", "train"),
    "AnnealedVAE": ("forward_backward", "train"),
    "StepCounter": ("forward_backward", "train"),
    "PhysicsInformed": ("forward_backward", "train"),
}
