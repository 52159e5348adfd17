"""Hooks of modules, parameters and optimizers, which a step may register or remove as it may change an attribute.

A step that registers them in its first call would otherwise do so whenever it is repeated from the start. A hook is
code, which no other process can be given: that one has its own from the same line, and is told how many to take.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle

from optexp.support.hooks import takes_hooks

OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
FLAGS = ("_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called")
OF_PARAMETERS = ("_backward_hooks", "_post_accumulate_grad_hooks")
OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")

Told = Mapping[str, tuple[frozenset[int], int]]  # by place: which of the first ones are there, how many others are


@dataclass
class Place:
    """One kind of hooks of one object, by their numbers."""

    owner: Any
    kind: str
    held: dict[int, Any]

    @property
    def users(self) -> list[int]:
        return [number for number, hook in self.held.items() if _is_users(hook)]

    def restore(self) -> None:
        now = getattr(self.owner, self.kind, None)
        if now is None or now.keys() == self.held.keys():  # without a dict, none was ever registered
            return
        for number in [number for number, hook in now.items() if number not in self.held and _is_users(hook)]:
            del now[number]
        now.update({number: hook for number, hook in self.held.items() if number not in now and not _is_own(hook)})


@dataclass
class Hooks:
    """Those of a model at one time, by place."""

    places: dict[str, Place] = field(default_factory=dict)

    def restore(self) -> None:
        for place in self.places.values():
            place.restore()

    def later(self, first: Hooks) -> Mapping[str, dict[int, Any]]:
        """By place, users' hooks that are there now and were not at first."""
        found = {key: place.held for key, place in self.places.items() if place.held and key in first.places}
        pairs = ((key, held, first.places[key].held) for key, held in found.items())
        new = {key: {n: h for n, h in held.items() if n not in old and _is_users(h)} for key, held, old in pairs}
        return {key: held for key, held in new.items() if held}

    def told(self, first: Hooks) -> Told:
        """Hooks that differ from the first ones."""
        later, found = self.later(first), {}
        for key, old in first.places.items():
            now = self.places[key].held if key in self.places else {}
            there = frozenset(index for index, number in enumerate(old.held) if number in now)
            if len(there) < len(old.held) or key in later:
                found[key] = there, len(later.get(key, ()))
        return found

    def of(self, handle: RemovableHandle) -> tuple[str, int]:
        """The hook that a handle removes: its place, and its index among the user's hooks there; -1 once removed."""
        held = handle.hooks_dict_ref()
        for key, place in self.places.items():
            if held is not None and getattr(place.owner, place.kind, None) is held:
                return key, place.users.index(handle.id) if handle.id in place.users else -1
        return "", -1

    def handle(self, key: str, index: int) -> RemovableHandle:
        """The handle that removes the same in this process."""
        place = self.places.get(key)
        if place is None or not 0 <= index < len(place.users):
            return RemovableHandle(OrderedDict())  # removes nothing
        made = RemovableHandle(getattr(place.owner, place.kind))
        made.id = place.users[index]
        return made

    def put(self, told: Told, known: Mapping[str, list[Any]]) -> None:
        """Bring hooks that are as they were at first, which these are, to what another process told of.

        known: by place, hooks that steps have registered here, by their numbers
        """
        for key, (there, count) in told.items():
            place = self.places[key]
            kept = {number: hook for index, (number, hook) in enumerate(place.held.items()) if index in there}
            Place(place.owner, place.kind, kept | dict(known.get(key, ())[:count])).restore()


def hooks(modules: Mapping[str, nn.Module], optimizer: Any = None) -> Hooks:
    """The present ones of these modules, by path, of their parameters, and of an optimizer."""
    owners: list[tuple[str, Any, tuple[str, ...]]] = [("optimizer", optimizer, OF_OPTIMIZERS)]
    for path, module in modules.items():
        if takes_hooks(module):
            owners.append((path, module, (*OF_MODULES, *FLAGS)))
            owners += [(f"{path}.{name}", p, OF_PARAMETERS) for name, p in module._parameters.items() if p is not None]
    places = ((name, Place(owner, kind, _held(owner, kind))) for name, owner, kinds in owners for kind in kinds)
    return Hooks({f"{name}/{place.kind}": place for name, place in places})


def _held(owner: Any, kind: str) -> dict[int, Any]:
    return dict(getattr(owner, kind, None) or {})  # a parameter has None before its first hook


def _is_users(hook: Any) -> bool:
    return callable(hook) and not _is_own(hook)  # the others are flags of hooks


def _is_own(hook: Any) -> bool:
    """Whether this project's code registered it, which watches a step and removes it by itself."""
    while isinstance(hook, partial):
        hook = hook.func
    module = getattr(hook, "__module__", None) or type(hook).__module__
    return f"{module}.".startswith("optexp.") and not module.startswith("optexp.workloads")
