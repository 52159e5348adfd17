"""What a user's training step remembers from call to call, beside the tensors of model and optimizer.

A schedule, a loss scale, an averaged model, a hidden state, a counter: where they are not put back, the same step is
another one the next time, and nothing can be compared.
"""

from __future__ import annotations

import copy
import io
import pickle
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import sqrt
from types import ModuleType, SimpleNamespace
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.data import DataLoader, Dataset, Sampler

from optexp.program import Packed, Remembered
from optexp.usermodel import trainstep
from optexp.usermodel.places import MISSING, Place, attributes, fixed, places, users

WITH_STATE = (Optimizer, LRScheduler, torch.amp.GradScaler)
PLAIN = (bool, int, float, complex, str, bytes, type(None), type(MISSING))
DATA = (DataLoader, Dataset, Sampler)  # are the feed's
DEPTH = 3  # of objects within objects
ENTRIES = 10_000  # of a list or a dict
SPACES = (SimpleNamespace, Namespace)
COARSE = 0.1  # by how much real numbers may differ where it shows in no result: they are rounded otherwise


# --- how each is read and put back ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Slot:
    read: Callable[[], Any]
    write: Callable[[Any], object]


def slots(place: Place, own: frozenset[int], depth: int = 0) -> Iterator[tuple[str, Slot]]:
    """By name. What belongs to model, optimizer or data is restored elsewhere (`own`: their identities)."""
    value = place.get()
    if id(value) in own or isinstance(value, (*DATA, ModuleType, type)):
        return
    if isinstance(value, WITH_STATE):
        yield place.name, Slot(value.state_dict, value.load_state_dict)
    elif isinstance(value, torch.Generator):
        yield place.name, Slot(value.get_state, value.set_state)
    elif isinstance(value, nn.Module):
        if not any(id(tensor) in own for tensor in (*value.parameters(), *value.buffers())):
            yield place.name, Slot(partial(_tensors, value), partial(_put_tensors, value))
    elif isinstance(value, Tensor):
        yield place.name, Slot(place.get, partial(_put_tensor, place, value))
    elif isinstance(value, (list, dict)) and not _plain(value):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in entries if depth < DEPTH and len(value) <= ENTRIES else ():
            yield from slots(fixed(f"{place.name}[{key!r}]", entry), own, depth + 1)
    elif isinstance(value, list):
        yield place.name, Slot(place.get, partial(_put_list, place, value))
    elif isinstance(value, dict):
        yield place.name, Slot(place.get, partial(_put_dict, place, value))
    elif place.set is not None and _plain(value):
        yield place.name, Slot(place.get, place.set)
    elif depth < DEPTH and hasattr(value, "__dict__") and (isinstance(value, SPACES) or users(type(value))):
        for inner in attributes(f"{place.name}.", value):
            yield from slots(inner, own | {id(value)}, depth + 1)


def _plain(value: Any) -> bool:
    try:
        leaves = tree_flatten(value)[0]
    except RecursionError:  # a list that holds itself
        return False
    return len(leaves) <= ENTRIES and all(isinstance(leaf, (*PLAIN, Tensor)) for leaf in leaves)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@torch.no_grad()
def _put_tensors(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """In place, where a captured graph may read them."""
    now = _tensors(module)
    for name, tensor in saved.items():
        if name in now and now[name].shape == tensor.shape:
            now[name].copy_(tensor)
        elif name in now:  # a memory bank, which grows
            owner, _, short = name.rpartition(".")
            held = tensor.to(now[name])
            setattr(
                module.get_submodule(owner), short, nn.Parameter(held) if isinstance(now[name], nn.Parameter) else held
            )


@torch.no_grad()
def _put_tensor(place: Place, first: Tensor, saved: Any) -> None:
    """Into the same memory, if it still fits: a captured graph may read it."""
    if isinstance(saved, Tensor) and saved.shape == first.shape:
        first.copy_(saved)
        first.grad = None
        saved = first
    if place.set is not None and place.get() is not saved:
        place.set(saved)


def _put_list(place: Place, first: list[Any], saved: Any) -> None:
    if isinstance(saved, list):
        first[:] = saved
        saved = first
    if place.set is not None:
        place.set(saved)


def _put_dict(place: Place, first: dict[Any, Any], saved: Any) -> None:
    if isinstance(saved, dict):
        first.clear()
        first.update(saved)
        saved = first
    if place.set is not None:
        place.set(saved)


# --- all of it ---------------------------------------------------------------------------------------------------


@dataclass
class Memory:
    """By name, what `step` remembers; `lost` says what cannot be put back.

    optimizer: its hyperparameters, which schedules change, count too; None where nothing is optimized
    """

    step: Callable[..., Any]
    model: nn.Module
    optimizer: Optimizer | None
    lost: list[str] = field(default_factory=list, init=False)
    first: Remembered = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        some = next(self.model.parameters(), torch.empty(0))
        self.device, self.dtype = some.device, some.dtype
        own = belongings(self.model) | ({id(self.optimizer)} if self.optimizer else set())
        self.slots: dict[str, Slot] = {}
        for place in places(self.step):
            for name, slot in slots(place, frozenset(own)):
                if name not in self.slots and self._works(name, slot):
                    self.slots[name] = slot
        for index, group in enumerate(self.optimizer.param_groups if self.optimizer else ()):
            for key, value in group.items():
                if isinstance(value, (int, float, tuple)) and not isinstance(value, bool):
                    setter = partial(_put_hyperparameter, group, key)
                    self.slots[f"optimizer/group{index}/{key}"] = Slot(partial(_number, group, key), setter)
        self.first = self.read()

    def read(self) -> Remembered:
        return {name: self._kept(name, slot.read()) for name, slot in self.slots.items()}

    def write(self, remembered: Remembered) -> None:
        for name, value in remembered.items():
            if not self._same(self.slots[name].read(), value):
                self.slots[name].write(self._copied(value))

    def changed(self, now: Remembered, then: Remembered | None = None) -> Packed:
        """What is no longer as it was (at first), for another process."""
        then = self.first if then is None else then
        return {name: self.pack(value) for name, value in now.items() if not self._same(value, then[name])}

    def unpack(self, packed: Packed) -> Remembered:
        """Where this program computes, and as finely."""
        found = {name: self._unpacked(bits) for name, bits in packed.items() if name in self.slots}
        return {name: tree_map(self._at_home, value) for name, value in found.items()}

    def alike(self, ours: bytes, theirs: bytes) -> bool:
        """Counts and texts equal, real numbers coarsely: what they do to results is judged elsewhere, and finely."""
        (one, shape), (other, as_well) = (tree_flatten(self._unpacked(packed)) for packed in (ours, theirs))
        if shape != as_well:
            return False
        off = size = 0.0
        for a, b in zip(one, other, strict=True):
            if _real(a) and _real(b):
                if isinstance(a, Tensor) and isinstance(b, Tensor) and a.shape != b.shape:
                    return False
                a, b = (torch.as_tensor(x, dtype=torch.float64).nan_to_num(0, 0, 0) for x in (a, b))
                off, size = off + float((a - b).square().sum()), size + float(b.square().sum())
            elif isinstance(b, Tensor):
                if not isinstance(a, Tensor) or not torch.equal(a, b):
                    return False
            elif isinstance(b, PLAIN) and a != b:
                return False
        return sqrt(off) <= COARSE * sqrt(size)

    def _at_home(self, value: Any) -> Any:
        if isinstance(value, nn.Module) and value is not self.model:
            return value.to(self.device, self.dtype)
        if isinstance(value, Tensor) and value.is_floating_point() and self.dtype is torch.float64:
            return value.detach().to(self.device, torch.float64).requires_grad_(value.requires_grad)
        return value.to(self.device) if isinstance(value, Tensor) else value

    # --- copies ---------------------------------------------------------------------------------------------------

    def pack(self, value: Any) -> bytes:
        buffer = io.BytesIO()
        _Pickler(buffer, self).dump(value)
        return buffer.getvalue()

    def _unpacked(self, packed: bytes) -> Any:
        return _Unpickler(io.BytesIO(packed), self).load()

    def _kept(self, name: str, value: Any) -> Any:
        """A copy; the first one, as long as nothing changed: teachers and tables of data may be large."""
        unchanged = name in self.first and self._same(value, self.first[name])
        return self.first[name] if unchanged else self._copied(value)

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad and value.is_leaf)
        if isinstance(value, PLAIN):
            return value
        memo = {id(self.optimizer): self.optimizer, id(self.model): self.model}
        return copy.deepcopy(tree_map_only(Tensor, self._copied, value), memo)

    def _same(self, ours: Any, theirs: Any) -> bool:
        if ours is theirs:
            return True
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            return ours.shape == theirs.shape and ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        if isinstance(ours, PLAIN) and isinstance(theirs, PLAIN):
            return ours == theirs or (ours != ours and theirs != theirs)
        (one, shape), (other, as_well) = tree_flatten(ours), tree_flatten(theirs)
        if shape != as_well:
            return False
        if len(one) == 1 and one[0] is ours:  # an object of a class of its own
            return self.pack(ours) == self.pack(theirs)
        return all(map(self._same, one, other))

    def _works(self, name: str, slot: Slot) -> bool:
        """Whether it can be read, put back, and told to another process: what has a state of its own may not."""
        try:
            if isinstance(slot.read(), Tensor) or getattr(slot.read, "func", None) is _tensors:
                return True
            value = self._copied(slot.read())
            slot.write(self._copied(self._unpacked(self.pack(value))))
            slot.write(value)
        except Exception as error:
            self.lost.append(f"{name} ({type(error).__name__})")
            return False
        return True


def _real(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.is_floating_point()
    return isinstance(value, float)


def _number(group: Mapping[str, Any], key: str) -> Any:
    value = group[key]
    return float(value) if isinstance(value, Tensor) else value


def _put_hyperparameter(group: dict[str, Any], key: str, value: Any) -> None:
    if not isinstance(group[key], Tensor):  # a rate that a strategy moved to the device is state
        group[key] = value


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Model and optimizer stay what they are there; equal tensors are equal bytes."""

    def __init__(self, file: io.BytesIO, memory: Memory) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_id(self, value: Any) -> Any:
        if value is self.memory.optimizer or type(value) is trainstep.Optimizer:
            return ("optimizer",) if value is not None else None
        if value is self.memory.model or type(value) is trainstep.Model:
            return ("model",)
        if isinstance(value, Tensor):
            flat = value.detach().cpu().contiguous().view(-1)
            bits = flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
            return "tensor", bits, value.dtype, tuple(value.shape), value.requires_grad and value.is_leaf
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, memory: Memory) -> None:
        super().__init__(file)
        self.memory = memory

    def persistent_load(self, token: Any) -> Any:
        kind, *facts = token
        if kind == "tensor":
            bits, dtype, shape, learns = facts
            flat = torch.frombuffer(bytearray(bits), dtype=dtype) if bits else torch.empty(0, dtype=dtype)
            return flat.view(shape).requires_grad_(learns)
        return getattr(self.memory, kind)


# --- elsewhere and in another precision ---------------------------------------------------------------------------


def move(step: Callable[..., Any], model: nn.Module, device: torch.device, dtype: torch.dtype) -> None:
    """Modules that a step names go where its model is, and into its precision; real tensors likewise in the reference.

    What the user keeps in a lower precision stays so, unless everything is to be float64.
    """
    own = belongings(model)
    for place in places(step):
        value = place.get()
        if isinstance(value, nn.Module):
            tensors = [*value.parameters(), *value.buffers()]
            kinds = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
            if id(value) not in own and not any(id(tensor) in own for tensor in tensors):
                value.to(device, dtype if dtype is torch.float64 or kinds <= {torch.float32} else None)  # type: ignore[call-overload]
        elif place.set is not None and dtype is torch.float64 and _plain(value):
            place.set(tree_map_only(Tensor, partial(_widened, device=device), value))


def belongings(model: nn.Module) -> set[int]:
    """Identities of a model and of all that is in it."""
    return set(map(id, (*model.modules(), *model.parameters(), *model.buffers())))


def _widened(tensor: Tensor, device: torch.device) -> Tensor:
    if not tensor.is_floating_point():
        return tensor
    wide = tensor.detach().to(device if tensor.device.type != "cpu" else tensor.device, torch.float64)
    return wide.requires_grad_(tensor.requires_grad)
