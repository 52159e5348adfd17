"""State that a user's training step keeps from call to call, beside the tensors of model and optimizer.

A schedule, a loss scale, an averaged model, a hidden state, a counter: where they are not put back, the same step is
another one the next time, and nothing can be compared.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle

from optexp.equivalence.optimizer_rules import LATER
from optexp.program import Packed, Remembered
from optexp.python_state import likeness
from optexp.python_state.counts import moved_on
from optexp.python_state.hooks import Hooks, hooks
from optexp.python_state.likeness import equal
from optexp.python_state.slots import (
    SIMPLE,
    WITH_STATE,
    Slot,
    Tree,
    has_made,
    plain,
    slots,
    tensors_in,
)
from optexp.python_state.variables import MISSING, attributes, places
from optexp.python_state.write_only import write_only
from optexp.user_code.later_rates import later_rates
from optexp.user_code.other_tensors import state_slots
from optexp.user_code.step_modules import belongings, parts
from optexp.user_code.step_packing import packed, unpacked

GENERATORS = ("random", "numpy.random")  # names of slots


@dataclass
class TrackedStepState:
    """By name, what `step` remembers; `lost` says what cannot be put back.

    optimizer: its hyperparameters, which schedules change, count too; None in inference
    aside:     objects that hold nothing of their own, as what is wrapped around the optimizer
    handed:    what the step is called with in place of model and optimizer, by these names: it may keep them
    """

    step: Callable[..., Any]
    model: nn.Module
    optimizer: Optimizer | None
    aside: Sequence[Any] = ()
    lost: list[str] = field(default_factory=list, init=False)
    handed: Mapping[str, Any] = field(default_factory=dict, init=False)
    first: Remembered = field(default_factory=dict, init=False)
    rates: dict[str, Sequence[float] | Sequence[Tensor]] = field(
        default_factory=dict, init=False
    )  # of schedules, later

    def __post_init__(self) -> None:
        some = next(self.model.parameters(), torch.empty(0))
        self.device, self.dtype = some.device, some.dtype
        self.slots: dict[str, Slot] = {}
        for place in places(self.step):
            for slot in slots(place, self._own()):
                self._add(slot)
        for slot in _held_by(self.model, self._own()):
            self._add(slot)
        for index, group in enumerate(self.optimizer.param_groups if self.optimizer is not None else ()):
            for key, value in group.items():
                if isinstance(value, (int, float, tuple)) and not isinstance(value, bool):
                    setter = partial(_put_hyperparameter, group, key)
                    self._add(Slot(f"optimizer/group{index}/{key}", value, partial(_number, group, key), setter))
        for slot in state_slots(self.optimizer, self.model) if self.optimizer is not None else ():
            self._add(slot)
        self._add(Slot("random", random, random.getstate, random.setstate))
        self._add(Slot("numpy.random", numpy.random, numpy.random.get_state, numpy.random.set_state))
        self.first = self.read()
        schedules = ((name, slot.held) for name, slot in self.slots.items() if isinstance(slot.held, LRScheduler))
        self.rates = {name: rates for name, schedule in schedules if (rates := later_rates(schedule))}

    @property
    def present(self) -> nn.Module:
        """The model of the last call, which a strategy may have put in the place of `model`."""
        found: nn.Module = self.handed["model"]._optexp.model if self.handed else self.model
        return found

    def hooks(self) -> Hooks:
        """The present ones of model and optimizer."""
        return hooks(dict(self.present.named_modules()), self.optimizer)

    def _own(self) -> frozenset[int]:
        """Identities of what is restored elsewhere."""
        others = (self.optimizer, *self.handed.values(), *self.aside)
        return frozenset({*belongings(self.present), *map(id, others)})

    def _add(self, slot: Slot) -> None:
        """One for each object, however many variables hold it; variables of the same name are numbered."""
        changes = not isinstance(slot.held, (*SIMPLE, tuple))
        if changes and any(other.held is slot.held for other in self.slots.values()):
            return
        names = (slot.name, *(f"{slot.name} ({number})" for number in range(2, len(self.slots) + 3)))
        name = next(name for name in names if name not in self.slots)
        if self._works(name, slot):
            self.slots[name] = slot

    def track(self, slot: Slot) -> None:
        """Follow one more, which begins with its present value."""
        self._add(slot)
        self.first = {**self.first, slot.name: self._copied(slot.read())}

    # --- what a program asks for --------------------------------------------------------------------------------

    def read(self) -> Remembered:
        found, own = {}, self._own()
        for name, slot in list(self.slots.items()):
            if isinstance(slot.write, Tree):
                slot.write.own = own
            try:
                found[name] = self._kept(name, self._held(slot))
            except Exception as error:  # a list may come to hold anything
                self._lose(name, error)
        return found

    def tensors(self) -> list[Tensor]:
        """Tensors of variables that were there before the first call. What calls make, as a loss, is no state."""
        values = [slot.read() for slot in self.slots.values() if slot.held is not MISSING]
        return [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]

    def kept_tensors(self) -> list[Tensor]:
        """Tensors of all variables, and of modules in them, no copies: what calls have made, too."""
        leaves = tree_flatten([slot.read() for slot in self.slots.values()])[0]
        modules = (tensors_in(leaf).values() for leaf in leaves if isinstance(leaf, nn.Module))
        return [*(leaf for leaf in leaves if isinstance(leaf, Tensor)), *chain.from_iterable(modules)]

    def write(self, remembered: Remembered) -> None:
        for name in remembered.keys() & self.slots.keys():
            slot, value = self.slots[name], remembered[name]
            if not self._same(self._held(slot), value):
                slot.write(self._copied(value))

    def move_on(self, seen: Sequence[Remembered], steps: int) -> tuple[set[int], bool]:
        """Move counts on by so many steps; `seen` after consecutive steps.

        Schedules, other optimizers and generators hold more than a count, which would not fit it.

        Returns:
            How far a step moves them, and whether schedules or other objects stay where they are.
        """
        paces, others = set[int](), False
        for name, slot in self.slots.items():
            if name in GENERATORS or not all(name in each for each in seen):
                continue
            if isinstance(slot.held, WITH_STATE) or has_made(seen[-1][name]):
                others = True
                continue
            value, found = moved_on([each[name] for each in seen], steps)
            if found:
                slot.write(value)
                paces |= found
        return paces, others

    def news(self, now: Remembered) -> Packed:
        """Values that differ from the first ones, to be put back elsewhere."""
        return {name: self.pack(value) for name, value in now.items() if not self._same(value, self.first[name])}

    def changed(self, then: Remembered, now: Remembered) -> Packed:
        """Values that differ from `then`, before and after, to be compared. An object that one call makes and later
        ones keep is no change."""
        both = {n: (then[n], value) for n, value in now.items() if n in then and then[n] is not MISSING}
        return {name: self.pack(pair) for name, pair in both.items() if not self._same(*pair)}

    def rules(self) -> dict[str, tuple[str, Sequence[Mapping[str, Any]]]]:
        """Class and hyperparameters of other optimizers, by group, and of schedules as they were at first; by name."""
        found = dict[str, tuple[str, Sequence[Mapping[str, Any]]]]()
        for name, slot in self.slots.items():
            found |= dict(_rules(name, slot))
            if isinstance(slot.held, LRScheduler) and isinstance(begun := self.first.get(name), Mapping):
                later = {LATER: self.rates[name]} if name in self.rates else {}
                found[name] = type(slot.held).__qualname__, [{**begun, **later}]
        return found

    def unpack(self, packed: Packed) -> Remembered:
        """As finely as this program computes."""
        found = {name: self._unpacked(bits) for name, bits in packed.items() if name in self.slots}
        return {name: tree_map(self._at_home, value) for name, value in found.items()}

    def apart(self, ours: bytes, theirs: bytes) -> list[float]:
        """How far two runs are from having changed each number likewise; infinitely, where they must be equal."""
        return likeness.apart(self._unpacked(ours), self._unpacked(theirs))

    def drift(self, ours: bytes, theirs: bytes) -> list[float]:
        """How far two runs are `apart` by noise of earlier steps, where that is little beside the changes."""
        return likeness.drift(self._unpacked(ours), self._unpacked(theirs))

    def same_start(self, ours: bytes, theirs: bytes) -> bool:
        """Whether two runs began with the same counts and texts."""
        return likeness.same_start(self._unpacked(ours), self._unpacked(theirs))

    def alike(
        self,
        ours: bytes,
        theirs: bytes,
        unit: float = 0.0,
        noise: Sequence[float] | None = None,
        drifted: bool = False,
    ) -> bool:
        """Whether two arms changed something likewise (see `optexp.python_state.likeness`)."""
        return likeness.alike(self._unpacked(ours), self._unpacked(theirs), unit, noise, drifted)

    def unseen(self, ours: bytes, theirs: bytes, unit: float, noise: Sequence[float]) -> bool:
        """Whether noise moves all that is not alike by so much that nothing wrong would show beside it."""
        return likeness.unseen(self._unpacked(ours), self._unpacked(theirs), unit, noise)

    def alike_in_kind(self, ours: bytes, theirs: bytes) -> bool:
        """Whether an entry of two arms holds as many values, in the same places."""
        one = self._unpacked_if_known(ours)
        return one is not None and likeness.alike_in_kind(one, self._unpacked(theirs))

    def same_form(self, ours: bytes, theirs: bytes) -> bool:
        """The same, in tensors of equal shapes."""
        one = self._unpacked_if_known(ours)
        return one is not None and likeness.same_form(one, self._unpacked(theirs))

    def lacking(
        self, ours: Sequence[bytes], theirs: bytes, unit: float, noise: Sequence[float], drifted: bool
    ) -> list[bool]:
        """Of values that one arm changes, and nothing that the other keeps changes alike: whether each is real."""
        known = [pair for pair in map(self._unpacked_if_known, ours) if pair is not None]
        return likeness.lacking(known, self._unpacked(theirs), unit, noise, drifted)

    def rearranged(self, ours: Sequence[bytes], theirs: bytes, unit: float, noise: Sequence[float]) -> bool | None:
        """Whether all rows that one arm writes are among those that the other holds then; None of none."""
        known = [pair for pair in map(self._unpacked_if_known, ours) if pair is not None]
        return likeness.rearranged(known, self._unpacked(theirs), unit, noise)

    def values(self, packed: Sequence[bytes]) -> list[tuple[Any, Any]]:
        """Before and after, of each value that an arm changes."""
        known = [pair for pair in map(self._unpacked_if_known, packed) if pair is not None]
        return [leaf for pair in known for leaf in likeness.values(pair)]

    def write_only(self, names: Collection[str]) -> set[str]:
        """Names of state that steps read only to update or print it."""
        return write_only(names, self.step, self.model)

    # --- copies -------------------------------------------------------------------------------------------------

    def pack(self, value: Any) -> bytes:
        return packed(value, self)

    def _unpacked(self, bits: bytes) -> Any:
        return unpacked(bits, self)

    def _unpacked_if_known(self, packed: bytes) -> Any:
        """None of objects whose class is in another program's file alone."""
        try:
            return self._unpacked(packed)
        except (AttributeError, ImportError):
            return None

    def _at_home(self, value: Any) -> Any:
        if isinstance(value, nn.Module) and value is not self.model:
            return value.to(self.device, self.dtype)
        if isinstance(value, Tensor) and value.is_floating_point() and self.dtype is torch.float64:
            return value.detach().to(torch.float64).requires_grad_(value.requires_grad)
        return value

    def _held(self, slot: Slot) -> Any:
        """The variable's value. One that a call makes is no state where it is code, or tensors of the model: a list of
        parameters, a compiled function."""
        value = slot.read()
        if slot.held is not MISSING or isinstance(value, SIMPLE):
            return value
        module = isinstance(value, nn.Module)
        held = tensors_in(value).values() if module else [v for v in tree_flatten(value)[0] if isinstance(v, Tensor)]
        own = belongings(self.present)
        return MISSING if (callable(value) and not module) or any(id(tensor) in own for tensor in held) else value

    def _kept(self, name: str, value: Any) -> Any:
        """A copy; the first one, as long as nothing changed: teachers and tables of data may be large."""
        unchanged = name in self.first and self._same(value, self.first[name])
        return self.first[name] if unchanged else self._copied(value)

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.detach().clone().requires_grad_(value.requires_grad and value.is_leaf)
        if isinstance(value, SIMPLE):
            return value
        handles = (leaf for leaf in tree_flatten(value)[0] if isinstance(leaf, RemovableHandle))
        same = [self.optimizer, *parts(self.present), *self.handed.values(), *handles]
        memo = {id(part): part for part in same}
        return copy.deepcopy(tree_map_only(Tensor, self._copied, value), memo)

    def _same(self, ours: Any, theirs: Any) -> bool:
        if ours is theirs:
            return True
        if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
            return equal(ours, theirs)
        if isinstance(ours, SIMPLE) and isinstance(theirs, SIMPLE):
            return ours == theirs or (ours != ours and theirs != theirs)
        if numbers_alone(ours) and numbers_alone(theirs) and ours == theirs:  # 600 of a generator's, in each step
            return True
        (one, shape), (other, as_well) = tree_flatten(ours), tree_flatten(theirs)
        if shape != as_well:
            return False
        if len(one) == 1 and one[0] is ours:  # an object of a class of its own
            return self.pack(ours) == self.pack(theirs)
        return all(map(self._same, one, other))

    def _works(self, name: str, slot: Slot) -> bool:
        """Whether it can be read, put back, and told to another process: what has a state of its own may not."""
        try:
            if not plain(slot.held) and getattr(slot.read, "func", None) is not tensors_in:
                value = self._copied(slot.read())
                slot.write(self._copied(self._unpacked(self.pack(value))))
                slot.write(value)
        except Exception as error:
            self._lose(name, error)
            return False
        return True

    def _lose(self, name: str, error: Exception) -> None:
        self.slots.pop(name, None)
        self.lost.append(f"{name} ({type(error).__name__})")


def _rules(name: str, slot: Slot) -> Iterator[tuple[str, tuple[str, Sequence[Mapping[str, Any]]]]]:
    """Those of an optimizer, or of optimizers in what a call has made."""
    if isinstance(slot.held, Optimizer):
        yield name, (type(slot.held).__qualname__, slot.held.param_groups)
    elif isinstance(slot.write, Tree):
        for inner, one in slot.write.inside(name):
            yield from _rules(inner, one)


def _held_by(model: nn.Module, own: frozenset[int]) -> Iterator[Slot]:
    """Optimizers, schedules and scalers that a model keeps for its own steps; its other attributes are its state."""
    for path, module in model.named_modules():
        for place in attributes(f"model.{path}." if path else "model.", module):
            yield from (slot for slot in slots(place, own) if isinstance(slot.held, WITH_STATE))


def _number(group: Mapping[str, Any], key: str) -> Any:
    value = group[key]
    return float(value) if isinstance(value, Tensor) else value


def numbers_alone(value: Any) -> bool:
    """Whether it is a tuple, at any depth, of values that compare plainly."""
    return type(value) is tuple and all(isinstance(entry, SIMPLE) or numbers_alone(entry) for entry in value)


def _put_hyperparameter(group: dict[str, Any], key: str, value: Any) -> None:
    if not isinstance(group[key], Tensor):  # a rate that a strategy moved to the device is state
        group[key] = value
