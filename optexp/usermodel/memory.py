"""What a user's training step remembers from call to call, beside the tensors of model and optimizer.

A schedule, a loss scale, an averaged model, a counter: where they are not put back, the same step is another one the
next time, and nothing can be compared.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from types import CellType, CodeType, FunctionType
from typing import Any

import cloudpickle
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from optexp.program import Remembered

RESTORED_ELSEWHERE = (Optimizer, DataLoader)
GROUP = "optimizer/group"  # and its number: no variable is called so


@dataclass(frozen=True)
class Memory:
    """Pickled, by name: what the step's file or a function around it calls that.

    step:      its globals that are numbers or tensors and that functions beside it assign, those of a function around
               it, and whatever it can reach there that has a `state_dict`
    optimizer: real hyperparameters, which schedules change; its tensors are restored elsewhere, and so is the model
    """

    step: Callable[..., Any]
    model: nn.Module
    optimizer: Optimizer

    def read(self) -> Remembered:
        own = {id(module) for module in self.model.modules()}
        may_change = set(self._cells).union(*(assigned(function.__code__) for function in self._functions()))
        found: dict[str, Any] = {}
        for name, value in self._reached().items():
            if isinstance(value, (bool, int, float, Tensor)):
                if name in may_change:
                    found[name] = value.detach() if isinstance(value, Tensor) else value
            elif id(value) not in own and has_state(value):
                found[name] = value.state_dict()
        for index, group in enumerate(self.optimizer.param_groups):
            numbers = {key: value for key, value in group.items() if isinstance(value, (float, tuple))}
            found |= {f"{GROUP}{index}/{key}": value for key, value in numbers.items()}
        return {name: cloudpickle.dumps(value) for name, value in found.items()}

    def write(self, remembered: Remembered) -> None:
        """What was made since is left as it is."""
        reached = self._reached()
        for name, packed in remembered.items():
            value = cloudpickle.loads(packed)
            if name.startswith(GROUP):
                index, _, key = name.removeprefix(GROUP).partition("/")
                group = self.optimizer.param_groups[int(index)]
                if not isinstance(group[key], Tensor):  # a rate that a strategy moved to the device is state
                    group[key] = value
            elif has_state(reached.get(name)):
                reached[name].load_state_dict(value)
            elif name in self._cells:
                self._cells[name].cell_contents = value
            else:
                self._scope[name] = value

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
    return not isinstance(value, (*RESTORED_ELSEWHERE, type)) and all(map(callable, methods))


def assigned(code: CodeType) -> set[str]:
    """The globals that a function assigns, or one inside it."""
    names = {str(step.argval) for step in dis.get_instructions(code) if step.opname == "STORE_GLOBAL"}
    return names.union(*(assigned(inner) for inner in code.co_consts if isinstance(inner, CodeType)))
