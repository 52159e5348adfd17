"""How one thing that a user's step remembers is read, and put back into the very same objects.

Other objects may hold them too: an optimizer its parameters, an agent its buffer, a captured graph its memory.
"""

from __future__ import annotations

from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten
from torch.utils.data import DataLoader, Dataset, Sampler

from optexp.python_state.variables import MISSING, Place, attributes, fixed, records_graphs, users
from optexp.support.random_state import state_of

WITH_STATE = (Optimizer, LRScheduler, torch.amp.GradScaler)
SIMPLE = (bool, int, float, complex, str, bytes, type(None), type(MISSING))
PLAIN = (*SIMPLE, Tensor, numpy.ndarray, numpy.generic, set, frozenset)
DATA = (DataLoader, Dataset, Sampler)  # are the feed's
SPACES = (SimpleNamespace, Namespace)
MADE = "made by a step"
HOW = {"foreach", "fused", "capturable", "differentiable"}  # options of an optimizer that change no result
DEPTH = 3  # of objects within objects
ENTRIES = 10_000  # of a list or a dict


@dataclass(frozen=True)
class Slot:
    """name: of the variable;  held: what it holds as the step begins its work"""

    name: str
    held: Any
    read: Callable[[], Any]
    write: Callable[[Any], object]


def slots(place: Place, own: frozenset[int], depth: int = 0) -> Iterator[Slot]:
    """Values of model, optimizer or data are restored elsewhere (`own`: their identities)."""
    name, value = place.name, place.get()
    if id(value) in own or isinstance(value, DATA) or depth > DEPTH:
        return
    made = partial(Slot, name, value)
    if isinstance(value, WITH_STATE) or _wraps_state(value):
        yield made(value.state_dict, value.load_state_dict)
    elif state := state_of(value):
        yield made(*state)
    elif isinstance(value, nn.Module):
        if is_skeleton(value) or any(id(tensor) in own for tensor in tensors_in(value).values()):  # around the model
            return
        yield made(partial(tensors_in, value), partial(_put_tensors, value))
        for inner in attributes(f"{name}.", value):
            short = inner.name.removeprefix(f"{name}.")
            if not short.startswith("_") and short != "training" and plain(inner.get()):
                yield from slots(inner, own, depth + 1)
    elif isinstance(value, type):
        for inner in _of_class(value) if users(value) and depth == 0 else ():
            yield from slots(inner, own, depth + 1)
    elif plain(value):
        if place.set is not None or isinstance(value, (Tensor, list, dict, set, deque, numpy.ndarray)):
            tree = Tree(place, value, own)
            yield made(tree.read, tree)
    elif isinstance(value, (list, dict)):
        for key in (list(value) if isinstance(value, dict) else range(len(value)))[:ENTRIES]:
            entry = Place(f"{name}[{key!r}]", partial(value.__getitem__, key), partial(value.__setitem__, key))
            yield from slots(entry, own, depth + 1)
    elif isinstance(value, tuple):
        for index, entry in enumerate(value[:ENTRIES]):
            yield from slots(fixed(f"{name}[{index}]", entry), own, depth + 1)
    elif records_graphs(type(value)):
        return
    elif isinstance(value, SPACES) or users(type(value)):
        for inner in attributes(f"{name}.", value):
            yield from slots(inner, own | {id(value)}, depth + 1)


def _wraps_state(value: Any) -> bool:
    """Whether it is a library's object around one of torch's, as Accelerate's scheduler is."""
    kind = type(value)
    both = hasattr(kind, "state_dict") and hasattr(kind, "load_state_dict")
    return both and not isinstance(value, nn.Module) and not users(kind)


def plain(value: Any) -> bool:
    """Whether it is a value, or values and tensors in lists, dicts and the like."""
    try:
        leaves = tree_flatten(value)[0]
    except RecursionError:  # a list that holds itself
        return False
    return len(leaves) <= ENTRIES and all(isinstance(leaf, PLAIN) and not _odd(leaf) for leaf in leaves)


def tensors_in(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def is_skeleton(module: nn.Module) -> bool:
    """Whether it has tensors without values, on the meta device, as a module has that torch.func calls on others."""
    return any(tensor.is_meta for tensor in tensors_in(module).values())


class Tree:
    """Plain values, and objects with a state that a step puts among them later: an optimizer, a user's trainer.

    Such an object is read as its own slots, under `MADE`, and stays the object that it is: others hold it, too.

    own:  as `slots` takes it
    made: those that were read last, with their slots, by their position among the leaves
    """

    def __init__(self, place: Place, value: Any, own: frozenset[int]) -> None:
        self.place, self.value, self.own = place, value, own
        self.leaves, self.spec = tree_flatten(value)
        self.made: dict[int, tuple[Any, list[Slot]]] = {}

    def read(self) -> Any:
        value = self.place.get()
        if isinstance(value, PLAIN):
            return value
        leaves, spec = tree_flatten(value)
        kinds = WITH_STATE if isinstance(value, (list, deque)) else (object,)  # a list's others are records, and grow
        late = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, kinds) and self._is_late(leaf)}
        if not late:
            return value
        self.made = {index: self._slots(index, leaf) for index, leaf in late.items()}
        states = {
            index: {MADE: index, "state": {slot.name: slot.read() for slot in inner}}
            for index, (_, inner) in self.made.items()
        }
        return tree_unflatten([states.get(index, leaf) for index, leaf in enumerate(leaves)], spec)

    def _is_late(self, leaf: Any) -> bool:
        kind = type(leaf)
        if id(leaf) in self.own or issubclass(kind, (nn.Module, type)) or callable(leaf):
            return False
        return issubclass(kind, WITH_STATE) or (users(kind) and hasattr(leaf, "__dict__"))

    def _slots(self, index: int, leaf: Any) -> tuple[Any, list[Slot]]:
        known = self.made.get(index)
        if known is None or known[0] is not leaf:
            return leaf, list(slots(fixed("", leaf), self.own))
        for slot in known[1]:
            if isinstance(slot.write, Tree):
                slot.write.own = self.own
        return known

    @torch.no_grad()
    def __call__(self, saved: Any) -> None:
        if not isinstance(saved, PLAIN):
            found = tree_leaves(saved, is_leaf=is_made)
            if any(is_made(leaf) and leaf[MADE] not in self.made for leaf in found):
                return  # this process has made none yet: its step will
            saved = tree_map(self._object, saved, is_leaf=is_made)
        leaves, spec = tree_flatten(saved)
        if spec == self.spec:
            saved = tree_unflatten([_into(old, new) for old, new in zip(self.leaves, leaves, strict=True)], spec)
        saved = refilled(self.value, saved)
        if self.place.set is not None:
            self.place.set(saved)

    def _object(self, saved: Any) -> Any:
        """The object whose state was read, in that state."""
        if not is_made(saved):
            return saved
        made, inner = self.made[saved[MADE]]
        for slot in inner:
            if slot.name in saved["state"]:
                slot.write(saved["state"][slot.name])
        return made

    def inside(self, name: str) -> Iterator[tuple[str, Slot]]:
        """Slots of the objects that are there now, by name."""
        self.read()
        there = set(map(id, tree_leaves(self.place.get())))
        made = {index: inner for index, (leaf, inner) in self.made.items() if id(leaf) in there}
        for index, inner in made.items():
            prefix = name if len(made) == 1 else f"{name}[{index}]"
            for slot in inner:
                yield f"{prefix}{slot.name}", slot


def is_made(value: Any) -> bool:
    return isinstance(value, dict) and MADE in value


def has_made(value: Any) -> bool:
    """Whether an object with a state of its own is among what was read."""
    return any(map(is_made, tree_leaves(value, is_leaf=is_made)))


def _into(old: Any, new: Any) -> Any:
    """The same tensor or array with other contents, where they fit."""
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape and not _shared(old):
        old.copy_(new)
        old.grad = None
        return old
    if isinstance(old, numpy.ndarray) and isinstance(new, numpy.ndarray) and old.shape == new.shape:
        old[...] = new
        return old
    return new


def refilled(kept: Any, saved: Any) -> Any:
    """The same list, dict, set or deque with other contents."""
    if saved is kept or type(saved) is not type(kept):
        return saved
    if isinstance(kept, list):
        kept[:] = saved
    elif isinstance(kept, (dict, set)):
        kept.clear()
        kept.update(saved)
    elif isinstance(kept, deque):
        kept.clear()
        kept.extend(saved)
    else:
        return saved
    return kept


@torch.no_grad()
def _put_tensors(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    now = tensors_in(module)
    for name in saved.keys() & now.keys():
        kept, tensor = now[name], saved[name]
        if kept.shape == tensor.shape:
            kept.copy_(tensor)
        else:  # a memory bank, which grows
            owner, _, short = name.rpartition(".")
            held = tensor.to(kept)
            setattr(module.get_submodule(owner), short, nn.Parameter(held) if isinstance(kept, nn.Parameter) else held)


def _of_class(kind: type) -> Iterator[Place]:
    for name in list(vars(kind)):
        if not name.startswith("__") and plain(vars(kind)[name]):
            yield Place(f"{kind.__name__}.{name}", partial(getattr, kind, name), partial(setattr, kind, name))


def _odd(leaf: Any) -> bool:
    """A tensor whose elements cannot be read one by one."""
    return isinstance(leaf, Tensor) and (leaf.layout is not torch.strided or leaf.is_meta or leaf.is_inference())


def _shared(tensor: Tensor) -> bool:
    """Whether several of its elements are one, as after `expand`."""
    return any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
