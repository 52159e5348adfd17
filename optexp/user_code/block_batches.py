"""The batch of a marked block without a loader: variables with tensors that it reads, and that it does not learn."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map_only

from optexp.python_state.likeness import equal
from optexp.python_state.variables import places
from optexp.support.marks import Mark
from optexp.user_code.marked_loop import MarkedLoop
from optexp.user_code.script_batches import tensors_of_data


def read_by(
    loop: MarkedLoop, function: FunctionType, known: Mapping[str, Any], before: Mapping[str, Any]
) -> dict[str, Any]:
    """Copies of what the block and functions that it calls read at one turn, by name; of what has not changed, the copy
    from the turn before.

    Args:
        function: The block.
        known: Variables of the script.
        before: As this returned it at the turn before.
    """
    called = (place.name for place in places(function) if known.get(place.name) is place.get())
    names = dict.fromkeys((*loop.reads, *called))
    held = {name: known[name] for name in names if name in known and _tensors(known[name])}
    return {n: before[n] if n in before and _equal(before[n], value) else _copied(value) for n, value in held.items()}


def batch_names(
    mark: Mark, loop: MarkedLoop, seen: Sequence[Mapping[str, Any]], known: Mapping[str, Any]
) -> tuple[list[str], bool]:
    """Names of the batch, and whether they hold what the loop learns.

    They are what changes between turns; else what the block makes for its next turn; else what is learned and is no
    parameter, as an image; else what never changes, as all the data there is. What changes, and functions of the block
    alone read, may be their state.

    Args:
        seen: As `read_by` returned it, turn by turn.
        known: Variables of the script at the last turn.
    """
    names = [name for name in seen[0] if all(name in turn for turn in seen)]
    own = {id(tensor) for value in (mark.model, *known.values()) for tensor in _of_module(value)}
    learned = {id(tensor) for value in (mark.optimizer, *known.values()) for tensor in _of_optimizer(value)}
    inside = {name: set(map(id, _tensors(known[name]))) for name in names}
    data = [name for name in names if not inside[name] & (own | learned)]
    changed = [name for name in data if any(not _equal(seen[0][name], turn[name]) for turn in seen[1:])]
    values = [name for name in changed if _in_containers(known[name])]  # objects that change may be the step's state
    values = [name for name in values if name in loop.reads]
    if drawn := [name for name in values if name not in loop.carried] or values:
        return drawn, False
    if images := [name for name in names if name not in loop.carried and inside[name] <= learned - own]:
        return images, True
    return [name for name in data if name not in loop.carried and name not in changed], False


def _of_module(value: Any) -> list[Tensor]:
    return [*value.parameters(), *value.buffers()] if isinstance(value, nn.Module) else []


def _of_optimizer(value: Any) -> list[Tensor]:
    groups = value.param_groups if isinstance(value, Optimizer) else ()
    return [tensor for group in groups for tensor in group["params"]]


def _tensors(value: Any) -> list[Tensor]:
    try:
        return _in_containers(value) or tensors_of_data(value)
    except TypeError:
        return []


def _in_containers(value: Any) -> list[Tensor]:
    """Tensors in lists, dicts and the like."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _copied(value: Any) -> Any:
    """A copy whose leaves require gradients where those of the value do."""
    copies = {id(t): t.detach().clone().requires_grad_(t.requires_grad and t.is_leaf) for t in _tensors(value)}
    if _in_containers(value):
        return tree_map_only(Tensor, lambda tensor: copies[id(tensor)], value)
    return copy.deepcopy(value, dict(copies))


def _equal(ours: Any, theirs: Any) -> bool:
    one, other = _tensors(ours), _tensors(theirs)
    return len(one) == len(other) and all(map(equal, one, other))


def varied(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """A tensor whose real numbers are smaller by up to a tenth: fresh values where a script has the same data always.

    Signs, zeros, bounds and symmetry of matrices stay.
    """
    if not (tensor.is_floating_point() or tensor.is_complex()) or tensor.layout is not torch.strided:
        return tensor
    shape, symmetric = tensor.shape, tensor.ndim > 1 and tensor.shape[-1] == tensor.shape[-2] > 1
    if symmetric and torch.equal(tensor, tensor.mT):
        factors = 1 - 0.05 * torch.rand(shape[:-1], generator=generator)
        factors = factors[..., None] * factors[..., None, :]
    else:
        factors = 1 - 0.1 * torch.rand(shape, generator=generator)
    return tensor * factors.to(tensor.device, tensor.real.dtype)
