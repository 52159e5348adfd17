"""Models as users write them, whose results are easily got wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils.checkpoint import checkpoint


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x)


class Masked(Linear):
    """Logits, with a number in place of some that means none."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).masked_fill(torch.arange(32, device=x.device) % 4 == 0, -1e9)


class Scored(Linear):
    """Tensors, and what is none."""

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.linear(x)
        return {"y": y, "size": y.norm().item(), "best": y.mean(0).argmax().item(), "kind": "linear"}


class Lazily(Linear):
    """Rows that somebody asks for, one by one."""

    factor = 1.0

    def forward(self, x: Tensor) -> tuple[Tensor, Any]:
        y = self.linear(x)
        return y, (row * self.factor for row in y)


class LazilyWrong(Lazily):
    factor = 1.01


class Chosen(Linear):
    """How many there are hangs on the last bits."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y, ((y * 2**20).long() % 2).nonzero()


class Expanded(Linear):
    """One row for all, in one place."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:1]).expand(len(x), -1)


class Repeated(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:1]).repeat(len(x), 1)


class Penalized(Linear):
    """Beside its result the exponential of its weight's square."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.penalty(self.linear.weight)

    def penalty(self, weight: Tensor) -> Tensor:
        return torch.linalg.matrix_exp(weight.T @ weight / 8).square().mean()


class PenalizedOnce(Penalized):
    """Computes that, and its gradient, anew where somebody has written to the weight."""

    known: tuple[int, Tensor, Tensor] | None = None

    def penalty(self, weight: Tensor) -> Tensor:
        if self.known is None or self.known[0] != weight._version:
            own = weight.detach().requires_grad_()
            value = super().penalty(own)
            self.known = weight._version, value.detach(), torch.autograd.grad(value, own)[0]
        return self.known[1] + (self.known[2] * (weight - weight.detach())).sum()


class Copied(Linear):
    """Its first call copies its weight; gradients go to the weight itself, whatever becomes of that."""

    copy: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weight = self.linear.weight
        if self.copy is None:
            self.copy = weight.detach().clone()
        return nn.functional.linear(x, self.copy + (weight - weight.detach()), self.linear.bias)


class Scaled(Linear):
    """By the size of its weight."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) / self.size()

    def size(self) -> Tensor:
        return self.linear.weight.detach().norm()


class ScaledAtFirst(Scaled):
    """By the size that it had at the first call."""

    known: Tensor | None = None

    def size(self) -> Tensor:
        if self.known is None:
            self.known = super().size()
        return self.known


class RecordsFirst(Linear):
    """Its first call records what later ones repeat, and hands out memory that nobody filled; as of a captured graph,
    nobody can put that back."""

    def __init__(self) -> None:
        super().__init__()
        recorded: list[None] = []

        def filled(y: Tensor) -> Tensor:
            if recorded:
                return y
            recorded.append(None)
            return torch.zeros_like(y)

        self.filled = partial(filled)

    def forward(self, x: Tensor) -> Tensor:
        return self.filled(self.linear(x))


class Clamped(Linear):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).clamp(-20, 20)


class Shift(nn.Module):
    """A bias, added to very many rows."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x.exp() + self.bias


class Gated(Linear):
    """A branch that a new model does not let through yet."""

    def __init__(self) -> None:
        super().__init__()
        self.branch = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 32))
        self.gate = nn.Parameter(torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.gate * self.branch(x)


class Dropping(nn.Module):
    """Learns with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 64)
        self.block = nn.Sequential(nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 64), nn.GELU(), nn.Dropout(0.1))
        self.last = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.block(self.first(x)))


class DroppingTwice(Dropping):
    """Computes what backward needs again, with the same masks."""

    def forward(self, x: Tensor) -> Any:
        return self.last(checkpoint(self.block, self.first(x), use_reentrant=False))


class DroppingByHand(Dropping):
    def forward(self, x: Tensor) -> Any:
        activation, dropout, linear = self.block[0], self.block[1], self.block[2]

        def dropped(x: Tensor) -> Tensor:
            return x * (torch.rand_like(x) >= dropout.p) / (1 - dropout.p) if dropout.p else x

        return self.last(dropped(activation(linear(dropped(activation(self.first(x)))))))


class Halved(Linear):
    """Computes with other parameters than its own, as meta-learning does."""

    def forward(self, x: Tensor) -> Any:
        halves = {name: parameter * 0.5 for name, parameter in self.linear.named_parameters()}
        return torch.func.functional_call(self.linear, halves, (x,))


class Large(Linear):
    """Float32 holds this, float16 does not."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x * 1e6)


class Overflowing(Linear):
    """Float32 overflows, and what is left is NaN."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) * 1e25
        return y * y - y * y * 0.5


class Tells(Linear):
    """Its weight as it is now."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.linear(x), self.linear.weight.detach().clone()


class Steep(Linear):
    """A loss whose gradients overflow at the scale that loss scaling begins with."""

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square().mean() * 3e4


class Turned(nn.Module):
    """Positions as rotations, which a complex buffer holds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)
        angles = torch.outer(torch.arange(16.0), 10_000 ** (-torch.arange(0, 64, 2) / 64))
        self.register_buffer("turn", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(self.linear(x).unflatten(-1, (32, 2)))
        return torch.view_as_real(pairs * self.turn).flatten(-2)


class TurnedInReals(Turned):
    def forward(self, x: Tensor) -> Tensor:
        turn, (a, b) = torch.view_as_real(self.turn), self.linear(x).unflatten(-1, (32, 2)).unbind(-1)
        cos, sin = turn.unbind(-1)
        return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class HardlyTurned(TurnedInReals):
    """The real part alone."""

    def forward(self, x: Tensor) -> Tensor:
        cos = self.turn.real
        return torch.stack([part * cos for part in self.linear(x).unflatten(-1, (32, 2)).unbind(-1)], -1).flatten(-2)


class Stream(nn.Module):
    """A causal filter of chunk after chunk: each begins with the end of the one before."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Conv1d(8, 8, 5)
        self.register_buffer("tail", torch.zeros(4, 8, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.tail, x], -1)
        self.tail.copy_(x[..., -4:])
        return self.filtered(x)

    def filtered(self, x: Tensor) -> Tensor:
        return self.filter(x)


class StreamByProducts(Stream):
    def filtered(self, x: Tensor) -> Tensor:
        y = torch.einsum("bctk,ock->bot", x.unfold(-1, 5, 1), self.filter.weight)
        return y + self.filter.bias[:, None]


class Rounded(nn.Module):
    """A product in integers, and no module inside."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64, 32) / 8)

    def product(self, x: Tensor) -> Tensor:
        return x @ self.weight

    def forward(self, x: Tensor) -> Tensor:
        return (self.product(x) * 30).round().clamp(-128, 127).to(torch.int8)


class RoundedInHalves(Rounded):
    def product(self, x: Tensor) -> Tensor:
        return x[:, :32] @ self.weight[:32] + x[:, 32:] @ self.weight[32:]


class Averaged(Linear):
    """Inference by weights that every call brings nearer to others, as somebody who still trains would."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Any:
        y = self.slow(x)
        self.refresh(0.1)
        return y

    def refresh(self, share: float) -> None:
        with torch.no_grad():
            for slow, fast in zip(self.slow.parameters(), self.linear.parameters(), strict=True):
                slow.lerp_(fast, share)


class Exchanged(Averaged):
    """Those weights come all at once, after ten calls."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def refresh(self, share: float) -> None:
        self.calls += 1
        super().refresh(1.0 if self.calls % 10 == 0 else 0.0)


class Normed(nn.Module):
    """A convolution and its norm, whose statistics no step of inference changes."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU())

    def forward(self, x: Tensor) -> Any:
        return self.net(x)


def folded(model: nn.Module) -> nn.Module:
    """Of a `Normed` model: one convolution with weights of both, made once."""
    net: Any = model.get_submodule("net")
    return nn.Sequential(fuse_conv_bn_eval(net[0].eval(), net[1].eval()), net[2])


def packed(model: nn.Module) -> nn.Module:
    """Of a `Linear` model: its weights in another layout, and no parameters."""
    linear: Any = model.get_submodule("linear")
    return Packed(linear.weight.detach().t().contiguous(), linear.bias.detach().clone())


class Packed(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor) -> None:
        super().__init__()
        self.packed = weight, bias

    def forward(self, x: Tensor) -> Any:
        weight, bias = self.packed
        return torch.addmm(bias, x, weight)
