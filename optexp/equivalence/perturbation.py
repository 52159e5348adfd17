"""Parameters that hide nothing: models begin with zeros and ones, and neither such a bias nor what such a gate lets
through shows in any result, so that a program without it would pass for the same. A target network begins as a copy of
another, and a program that takes the one for the other would pass, too."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from optexp.support.sparse import is_sparse
from optexp.support.wrapped import is_wrapped

SOME = 256  # elements, far apart, by which a tensor is known
FEW = 4  # elements to a value, or more: they were filled in and not drawn
STATISTICS = ("running_mean", "running_var")  # of a norm that has seen nothing yet
EXCHANGED: Mapping[float | None, float] = {0.0: 0.125, 0.125: 0.0, 1.0: 0.5, 0.5: 1.0}
FAR = 5.0  # standard deviations: signs stay
SPREAD = 0.1  # of a value, or of 1: enough to show at 16 bits


@torch.no_grad()
def vary(model: nn.Module, seed: int) -> list[str]:
    """Move what was filled with one value or a few, and copies of parameters that learn, in place and by the same in
    every process; returns its names.

    Signs stay, and so do single numbers other than 0 and ±1: a model may take such a one for a size or an exponent.
    """
    generator, varied = torch.Generator().manual_seed(seed), []
    for name, tensor in copies(model):
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        tensor.copy_(torch.where(noise.abs() < FAR, tensor * (1.0 + SPREAD * noise), tensor))
        varied.append(name)
    for name, tensor in candidates(model):
        if is_filled(tensor):
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(moved(tensor.detach().to("cpu", torch.float32), noise))
            varied.append(name)
    return varied


def told(varied: Sequence[str]) -> str:
    """For people; empty where nothing was moved."""
    if not varied:
        return ""
    few = ", ".join(varied[:3]) + (", ..." if len(varied) > 3 else "")
    return f"{few} ({len(varied)}) began as one value, or as a copy, and had others near it; what is timed has its own"


def candidates(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from ((name, b) for name, b in model.named_buffers() if name.rpartition(".")[2] in STATISTICS)


def copies(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Tensors that were drawn, and have the values of a parameter that learns and lies elsewhere."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    alike: dict[tuple[Any, ...], list[tuple[str, Tensor]]] = defaultdict(list)
    for name, tensor in (parameters | buffers).items():
        real = tensor.is_floating_point() and tensor.itemsize > 1 and tensor.numel() > 1
        if real and not (is_sparse(tensor) or is_wrapped(tensor)):
            flat = tensor.detach().reshape(-1)
            some = flat[:: -(-len(flat) // SOME)].tolist()
            alike[tensor.shape, tensor.dtype, *some].append((name, tensor))
    found = list[tuple[str, Tensor]]()
    for same in alike.values():
        source = next((tensor for name, tensor in same if name in parameters and tensor.requires_grad), None)
        if source is not None and len(same) > 1 and not is_filled(source):
            others = ((name, t) for name, t in same if t.data_ptr() != source.data_ptr() and torch.equal(t, source))
            found += others
    return found


def is_filled(tensor: Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.itemsize < 2 or not tensor.numel() or is_sparse(tensor):
        return False
    if is_wrapped(tensor):
        return False
    flat = tensor.detach().reshape(-1)
    some = flat[:: -(-len(flat) // SOME)].float()
    if not some.isfinite().all():
        return False
    if len(flat) == 1:
        return abs(some.item()) in (0.0, 1.0)
    values = some.unique()
    neutral = bool((values * values.abs() == values).all())  # 0, 1 and −1, as of a transformation that changes nothing
    return neutral or len(values) <= max(1, len(some) // FEW)


def moved(old: Tensor, noise: Tensor) -> Tensor:
    """Zeros of a matrix become as large as those that are drawn for one of so many columns."""
    scale = SPREAD * old.abs().clamp(min=1.0)
    if old.ndim > 1 and not old.any():
        scale = scale.fill_(0.5 / (old.numel() / old.shape[0]) ** 0.5)
    new = old + scale * noise
    return torch.where(old == 0, new, new.abs().copysign(old))


@torch.no_grad()
def turn_parameters(state: Mapping[str, Tensor]) -> None:
    """Other values, in place: of what holds one value `EXCHANGED`'s, else the sign of every second parameter. Exact in
    every dtype, and done twice it is nothing."""
    real = {name: t for name, t in state.items() if t.is_floating_point() or t.is_complex()}
    names = sorted(name for name in real if name.startswith("param/"))
    turned = {*(names[1::2] or names)}
    for name in names:
        value = _only_value(state[name])
        if value in EXCHANGED:
            state[name].fill_(EXCHANGED[value])
        elif name in turned:
            state[name].neg_()


@torch.no_grad()
def move_parameters(parameters: Mapping[str, Tensor]) -> None:
    """Other values of all, in place, as an optimizer gives between two steps: zeros become `EXCHANGED`'s, others
    halves and quarters in turn. Exact wherever nothing underflows; signs stay, as a scale's under a root must."""
    real = sorted(name for name, t in parameters.items() if t.is_floating_point() or t.is_complex())
    for place, name in enumerate(real):
        if _only_value(parameters[name]) == 0.0:
            parameters[name].fill_(EXCHANGED[0.0])
        else:
            parameters[name].mul_(0.25 if place % 2 else 0.5)


def _only_value(tensor: Tensor) -> float | None:
    """The value of all elements; None where there are several."""
    if not tensor.is_floating_point() or not tensor.numel() or is_sparse(tensor):
        return None
    first = tensor.reshape(-1)[0]
    return float(first) if bool((tensor == first).all()) else None
