"""Runs of the baseline with a little noise: how far honest arithmetic may move a quantity.

ReLU and max-pool make gradients jump, so that one run's error says little about another's: with a single run as
yardstick, honest implementations were rejected by up to 850 times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.nn.modules.conv import _ConvNd
from torch.utils import _pytree as pytree

from optexp.equivalence.tensor_math import name_of
from optexp.support.hooks import takes_hooks
from optexp.support.nested import rows
from optexp.support.sparse import is_sparse
from optexp.support.tolerances import tolerance_of
from optexp.support.wrapped import parts

RUNS = 6

# Noise in units of u. At fp32 jumps are rare, and many times u are needed for six runs to meet some; at 8 or 11 bits
# every run meets many, and a few times what a product's rounded inputs leave in it (0.8 u) is enough: with 8 u a
# gradient of a deep network was allowed to be a fifth of its size off.
_AMPLITUDE = {"float64": 64.0, "float32": 64.0, "tf32": 1.0, "float16": 2.0, "bfloat16": 2.0}
_CONTAINERS = (nn.ParameterList, nn.ParameterDict)  # childless, but never called


def amplitude(name: str, share: float = 1.0) -> float:
    """Of noise in an arithmetic, relative to what it is added to.

    share: of the usual noise; less than 1 u is none, as a product's rounded inputs leave that much
    """
    usual = _AMPLITUDE.get(name, _AMPLITUDE["bfloat16"])
    return max(share * usual, min(usual, 1.0)) * tolerance_of(name).unit


def alone(model: nn.Module) -> bool:
    """Whether there are no modules inside."""
    return all(isinstance(child, _CONTAINERS) for child in model.children())


@contextmanager
def noisy(
    model: nn.Module, seed: int, dtype: torch.dtype | None = None, share: float = 1.0
) -> Iterator[set[torch.dtype]]:
    """Inside, every leaf module's output, and the gradient that comes back to it, gets Gaussian noise in proportion to
    its RMS and its dtype's rounding. (Where a gradient cancels to zero, only noise on the way back shows its error.)
    Runs beyond RUNS are for integers alone: there a model without modules inside, which may round its results itself,
    has its parameters disturbed; so has a model of TorchScript, which takes no hooks.

    dtype: whose rounding, where that of the model's own, finer dtype is not meant
    share: of the usual noise
    Yields the dtypes that got some, as it goes.
    """
    generators: dict[torch.device, torch.Generator] = {}
    met = set[torch.dtype]()

    def with_noise(module: nn.Module, value: Any) -> Any:
        if isinstance(value, Tensor) and value.is_nested:
            return _in_rows(value, partial(with_noise, module))
        if not isinstance(value, Tensor) or name_of(value.dtype) not in _AMPLITUDE or is_sparse(value):
            return value
        met.add(value.dtype)
        arithmetic = _arithmetic(module, value.is_cuda, dtype or value.dtype)
        changed = added(value, arithmetic)
        if changed.requires_grad:
            changed.register_hook(partial(back, name=arithmetic))
        return changed

    def back(gradient: Tensor | None, name: str) -> Tensor | None:
        return None if gradient is None else added(gradient, name)  # none comes back where a gradient is differentiated

    def added(value: Tensor, name: str) -> Tensor:
        if value.device not in generators:
            generators[value.device] = torch.Generator(value.device).manual_seed(seed)
        wide = torch.float64 if value.dtype is torch.float64 else torch.float32
        scale = value.detach().to(wide).square().mean().sqrt() * amplitude(name, share)
        with temporarily_clear_interpreter_stack():  # vmap draws nothing; every row gets the same
            drawn = torch.randn(value.shape, generator=generators[value.device], device=value.device, dtype=wide)
        noise = drawn * scale
        if dtype is not None:  # in which as little beside so much is lost, and what is alike stays so
            noise = noise.where(4 * noise.abs() >= torch.finfo(dtype).eps * value.detach().abs(), 0.0)
        return value + noise.to(value.dtype)

    def hook(module: nn.Module, args: Any, output: Any) -> Any:
        return pytree.tree_map(partial(with_noise, module), output)

    leaves = [m for m in model.modules() if not any(m.children()) and not isinstance(m, _CONTAINERS)]
    handles = [leaf.register_forward_hook(hook) for leaf in leaves or [model] if takes_hooks(leaf)]
    for_integers = alone(model) and seed > RUNS and dtype is None
    try:
        with disturbed(model, seed) if for_integers or not handles else nullcontext():
            yield met
    finally:
        for handle in handles:
            handle.remove()


def _in_rows(nested: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A nested tensor with its rows changed, if they lie in one dense tensor."""
    if (found := rows(nested)) is None:
        return nested
    return torch.nested.nested_tensor_from_jagged(change(found[0]), found[1])


@contextmanager
def disturbed(model: nn.Module, seed: int | None) -> Iterator[None]:
    """Inside, every parameter begins with as much noise, each value in proportion to itself; with a seed, that is.

    Compiled and captured programs meet it too, which hooks of modules do not.
    """
    kept = [] if seed is None else [(values, values.clone()) for values in _values(model)]
    try:
        if seed is not None:
            move(model, seed, amplitude)
        yield
    finally:
        with torch.no_grad():
            for values, value in kept:
                values.copy_(value)


@torch.no_grad()
def move(model: nn.Module, seed: int, far: Callable[[str], float]) -> None:
    """Every value of its parameters up or down by so much of itself, by their dtype's name."""
    for index, parameter in enumerate(_values(model)):
        if (name := name_of(parameter.dtype)) in _AMPLITUDE:
            generator = torch.Generator(parameter.device).manual_seed(1000 * seed + index)
            signs = torch.empty(parameter.shape, dtype=torch.int8, device=parameter.device)
            signs.random_(0, 2, generator=generator).mul_(2).sub_(1)
            parameter.addcmul_(parameter, signs, value=far(name))


def _values(model: nn.Module) -> Iterator[Tensor]:
    """Dense parts of every parameter, in its memory: values and indices of a sparse one, inner tensors of a wrapper."""
    for parameter in model.parameters():
        yield from parts(parameter).values()


def _arithmetic(module: nn.Module, on_gpu: bool, dtype: torch.dtype) -> str:
    """The dtype whose rounding a module's output shows: float32 products may be TF32's, convolutions by default."""
    if on_gpu and dtype is torch.float32:
        backends: Any = torch.backends
        settings = backends.cudnn.conv if isinstance(module, _ConvNd) else backends.cuda.matmul
        if settings.fp32_precision == "tf32":
            return "tf32"
    return name_of(dtype)
