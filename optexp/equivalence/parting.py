"""Where two runs of one model part: the first module whose result is another one than float64's.

Asked where the baseline is further from float64 than rounding explains: then its code computes something else there, as
a constant that depends on the dtype, or a branch on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import sqrt
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from optexp.support.hooks import takes_hooks

SAMPLES = 256  # elements of each result, far apart
PARTED = 2.0**-12  # of a result's size, in a run in float32: far above rounding, below what is worth asking about
PARTED_LOW = 2.0**-2  # the same where precision is low


@dataclass(frozen=True)
class Passed:
    """Some elements of what one module returned, in the order of their ends.

    path: dotted; empty for the model itself;  kind: name of its class
    """

    path: str
    kind: str
    values: tuple[float, ...]


@contextmanager
def watched(model: nn.Module) -> Iterator[list[Passed]]:
    """Inside, every module notes what it returns."""
    passed: list[Passed] = []

    def note(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.layout is torch.strided:
                    passed.append(Passed(path, type(module).__name__, _some(leaf)))

        return hook

    modules = [(path, module) for path, module in model.named_modules() if takes_hooks(module)]
    handles = [module.register_forward_hook(note(path)) for path, module in modules]
    try:
        yield passed
    finally:
        for handle in handles:
            handle.remove()


def _some(tensor: Tensor) -> tuple[float, ...]:
    flat = tensor.detach().reshape(-1)
    return tuple(flat[:: -(-len(flat) // SAMPLES) or 1].to(torch.float64).tolist())


def first_apart(ours: Sequence[Passed], theirs: Sequence[Passed], low: bool = False) -> str:
    """The first module where a run and float64's part, for people; empty where they part behind all modules."""
    for one, other in zip(ours, theirs, strict=False):
        if one.path != other.path or len(one.values) != len(other.values):
            return f"another module is called there: {_named(one)}, and {_named(other)} in float64"
        if _apart(one.values, other.values) > (PARTED_LOW if low else PARTED):
            return _named(one)
    return ""


def _named(passed: Passed) -> str:
    return f"{passed.path} ({passed.kind})" if passed.path else f"{passed.kind} itself"


def _apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    pairs = [(a, b) for a, b in zip(ours, theirs, strict=True) if abs(a) < float("inf") > abs(b)]
    size = sqrt(sum(b * b for _, b in pairs))
    off = sqrt(sum((a - b) ** 2 for a, b in pairs))
    return off / size if size else float(off > 0)
