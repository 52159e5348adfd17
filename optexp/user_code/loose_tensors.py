"""Tensors that a script without any module trains, as a module."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from optexp.python_state.variables import places

LOOSE = (
    "the script has no module: the tensors that it trains ({}) are the model, and strategies that change a model's call"
    " do not reach its step; compute in the forward of an nn.Module"
)


class LooseTensors(nn.Module):
    """A module that holds a script's own tensors as its parameters, and is never called."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, tensor in tensors.items():
            tensor._is_param = True  # type: ignore[attr-defined]  # torch's mark: the script holds the same object
            self.register_parameter(name, tensor)  # type: ignore[arg-type]


def loose_tensors(body: Callable[..., Any], optimizer: Any) -> LooseTensors | None:
    """The tensors that an optimizer holds, or without one those that the body of a loop names and that learn.

    Args:
        body: The marked body as a function over the script's variables.
        optimizer: The only one, or None.
    """
    named = {id(leaf): (name, leaf) for name, leaf in _named(body)}
    held: Iterable[Tensor] = (leaf for _, leaf in named.values() if leaf.requires_grad and leaf.is_leaf)
    if optimizer is not None:
        held = (tensor for group in optimizer.param_groups for tensor in group["params"])
    found = {named.get(id(tensor), (f"tensor{i}", tensor))[0]: tensor for i, tensor in enumerate(held)}
    return LooseTensors(found) if found else None


def _named(body: Callable[..., Any]) -> Iterable[tuple[str, Tensor]]:
    """Tensors in the body's variables; those in lists and the like first, so that a variable of its own names one."""
    for single in (False, True):
        for place in places(body):
            leaves = [leaf for leaf in tree_leaves(place.get()) if isinstance(leaf, Tensor)]
            alone = len(leaves) == 1
            for index, leaf in enumerate(leaves) if alone is single else ():
                name = place.name.replace(".", "_")
                yield name if alone else f"{name}_{index}", leaf
