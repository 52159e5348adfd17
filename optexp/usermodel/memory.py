"""What a user's training step remembers from call to call, beside the tensors of model and optimizer.

A schedule, a loss scale, an averaged model, a counter: where they are not put back, the same step is another one the
next time, and nothing can be compared.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from optexp.program import Remembered

NO_STATE = (Optimizer, DataLoader, ModuleType, type)  # or restored elsewhere
GROUP = "optimizer/group"  # and its number: no variable is called so


@dataclass
class Memory:
    """Pickled, by name: what the step's file or a function around it calls that.

    step:      its globals that are numbers or tensors and that functions beside it assign, those of a function around
               it, and whatever it can reach there that has a `state_dict`
    optimizer: real hyperparameters, which schedules change; its tensors are restored elsewhere, and so is the model
    """

    step: Callable[..., Any]
    model: nn.Module
    optimizer: Optimizer
    first: Remembered | None = field(default=None, init=False)
    modules: dict[str, tuple[list[float], bytes]] = field(default_factory=dict, init=False)  # as they were read last

    def read(self) -> Remembered:
        own = {id(module) for module in self.model.modules()}
        may_change = set(self._cells).union(*(assigned(function.__code__) for function in self._functions()))
        found: dict[str, bytes] = {}
        for name, value in self._reached().items():
            if isinstance(value, (bool, int, float, Tensor)):
                if name in may_change:
                    found[name] = cloudpickle.dumps(value.detach() if isinstance(value, Tensor) else value)
            elif id(value) not in own and has_state(value):
                with suppress(Exception):  # what cannot be pickled cannot be put back
                    found[name] = self._packed(name, value)
        for index, group in enumerate(self.optimizer.param_groups):
            for key, number in group.items():
                if isinstance(number, (float, tuple)):
                    found[f"{GROUP}{index}/{key}"] = cloudpickle.dumps(number)
        self.first = self.first or found
        return found

    def news(self) -> Remembered:
        """What is no longer as it was read first."""
        now = self.read()
        return {name: packed for name, packed in now.items() if packed != (self.first or {}).get(name)}

    def write(self, remembered: Remembered) -> None:
        """What was made since is left as it is."""
        reached = self._reached()
        for name, packed in remembered.items():
            target = reached.get(name)
            if name.startswith(GROUP):
                self._set_hyperparameter(name, cloudpickle.loads(packed))
            elif target is not None and has_state(target):
                self._load(name, target, packed)
            elif name in self._cells:
                self._cells[name].cell_contents = cloudpickle.loads(packed)
            else:
                self._scope[name] = cloudpickle.loads(packed)

    def _packed(self, name: str, value: Any) -> bytes:
        """A module may be large, and most never change: those are pickled once."""
        if not isinstance(value, nn.Module):
            packed: bytes = cloudpickle.dumps(value.state_dict())
            return packed
        now = sizes(value)
        if name not in self.modules or self.modules[name][0] != now:
            self.modules[name] = now, cloudpickle.dumps(value.state_dict())
        return self.modules[name][1]

    def _load(self, name: str, target: Any, packed: bytes) -> None:
        if isinstance(target, nn.Module):
            if self.modules.get(name) == (sizes(target), packed):
                return
            target.load_state_dict(cloudpickle.loads(packed))
            self.modules[name] = sizes(target), packed
        else:
            target.load_state_dict(cloudpickle.loads(packed))

    def _set_hyperparameter(self, name: str, value: Any) -> None:
        index, _, key = name.removeprefix(GROUP).partition("/")
        group = self.optimizer.param_groups[int(index)]
        if not isinstance(group[key], Tensor):  # a rate that a strategy moved to the device is state
            group[key] = value

    def _reached(self) -> Mapping[str, Any]:
        return {**self._scope, **{name: cell.cell_contents for name, cell in self._cells.items()}}

    @property
    def _scope(self) -> MutableMapping[str, Any]:
        return getattr(self.step, "__globals__", {})

    @property
    def _cells(self) -> dict[str, CellType]:
        names = self.step.__code__.co_freevars if isinstance(self.step, FunctionType) else ()
        cells = getattr(self.step, "__closure__", None) or ()
        return {name: cell for name, cell in zip(names, cells, strict=True) if cell != CellType()}

    def _functions(self) -> list[FunctionType]:
        """The step, and others of its file."""
        home = getattr(self.step, "__module__", None)
        beside = [value for value in self._scope.values() if getattr(value, "__module__", None) == home]
        return [value for value in (self.step, *beside) if isinstance(value, FunctionType)]


def has_state(value: Any) -> bool:
    """Whether it can be asked for its state and given another; what the core restores itself is left out."""
    methods = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return not isinstance(value, NO_STATE) and all(map(callable, methods))


def sizes(module: nn.Module) -> list[float]:
    """A number for each of its tensors, which hardly stays the same when one of them changes."""
    norms = [torch.linalg.vector_norm(tensor.detach().to(torch.float64)) for tensor in module.state_dict().values()]
    return torch.stack([norm.cpu() for norm in norms]).tolist() if norms else []


@cache
def assigned(code: CodeType) -> set[str]:
    """The globals that a function assigns, or one inside it."""
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    return names.union(*(assigned(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
