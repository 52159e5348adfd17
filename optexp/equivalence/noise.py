"""Runs of the baseline with a little noise: how far honest arithmetic may move a quantity.

ReLU and max-pool make gradients jump, so that one run's error says little about another's: with a single run as
yardstick, honest implementations were rejected by up to 850 times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
    Parameters that no hook covers are disturbed instead (see `unhooked`); so are all those of TorchScript, which takes
    no hooks. A model without modules inside may round its results itself: its parameters are disturbed in runs beyond
    RUNS alone, which are for integers.

    dtype: whose rounding, where that of the model's own, finer dtype is not meant; such a step loads its parameters
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

    handles = [leaf.register_forward_hook(hook) for leaf in _leaves(model) or [model] if takes_hooks(leaf)]
    kept_on_grid = alone(model) and bool(handles) and seed <= RUNS
    try:
        with disturbed(model, None if kept_on_grid or dtype is not None else seed, unhooked(model)):
            yield met
    finally:
        for handle in handles:
            handle.remove()


def _in_rows(nested: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """A nested tensor with its rows changed, if they lie in one dense tensor."""
    if (found := rows(nested)) is None:
        return nested
    return torch.nested.nested_tensor_from_jagged(change(found[0]), found[1])


def unhooked(model: nn.Module) -> dict[str, nn.Parameter]:
    """By name, the parameters whose use no hook of a leaf module covers.

    Functions use the parameters of lists, and of modules with others inside: meta-learning, attention's projections.
    All parameters of a model without modules inside, or of TorchScript.
    """
    leaves = [] if alone(model) else [leaf for leaf in _leaves(model) if takes_hooks(leaf)]
    covered = {id(p) for leaf in leaves for p in nn.Module.parameters(leaf, recurse=False)}
    return {name: p for name, p in model.named_parameters() if id(p) not in covered}


def _leaves(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if not any(m.children()) and not isinstance(m, _CONTAINERS)]


@contextmanager
def disturbed(model: nn.Module, seed: int | None, some: Mapping[str, nn.Parameter] | None = None) -> Iterator[None]:
    """Inside, every parameter begins with as much noise, each value in proportion to itself; with a seed, that is.
    The noise is gone afterwards, and a step's changes remain.

    Compiled and captured programs meet it too, which hooks of modules do not.

    some: parameters that get it; None for all
    """
    parameters = [] if seed is None else list(model.parameters() if some is None else some.values())
    kept = [(values, values.clone()) for values in _values(parameters)]
    if seed is not None:
        _move(parameters, seed, amplitude)
    begun = [values.clone() for values, _ in kept]
    try:
        yield
    finally:
        with torch.no_grad():
            for (values, value), noisy_value in zip(kept, begun, strict=True):
                values.copy_(value.where(values == noisy_value, values - noisy_value + value))


def move(model: nn.Module, seed: int, far: Callable[[str], float]) -> None:
    """Every value of its parameters up or down by so much of itself, by their dtype's name."""
    _move(model.parameters(), seed, far)


@torch.no_grad()
def _move(parameters: Iterable[Tensor], seed: int, far: Callable[[str], float]) -> None:
    for index, values in enumerate(_values(parameters)):
        if (name := name_of(values.dtype)) in _AMPLITUDE:
            move_values(values, far(name), torch.Generator(values.device).manual_seed(1000 * seed + index))


def move_values(values: Tensor, far: float, generator: torch.Generator) -> None:
    """Each value up or down by so much of itself, in place."""
    signs = torch.empty(values.shape, dtype=torch.int8, device=values.device)
    values.addcmul_(values, signs.random_(0, 2, generator=generator).mul_(2).sub_(1), value=far)


def _values(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """Dense parts of parameters, in their memory: values and indices of a sparse one, inner tensors of a wrapper."""
    for parameter in parameters:
        yield from parts(parameter).values()


def _arithmetic(module: nn.Module, on_gpu: bool, dtype: torch.dtype) -> str:
    """The dtype whose rounding a module's output shows: float32 products may be TF32's, convolutions by default."""
    if on_gpu and dtype is torch.float32:
        backends: Any = torch.backends
        settings = backends.cudnn.conv if isinstance(module, _ConvNd) else backends.cuda.matmul
        if settings.fp32_precision == "tf32":
            return "tf32"
    return name_of(dtype)
