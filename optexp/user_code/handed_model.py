"""The model that a user's training step is handed: its call is what strategies made of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from optexp.program import Program
from optexp.python_state.variables import users
from optexp.user_code.handed_optimizer import Optimizer


def _is_users(value: Any, model: Any) -> bool:
    """Whether `value` is a method of `model` that the user's class defines."""
    if not isinstance(value, MethodType) or value.__self__ is not model or not users(type(model)):
        return False
    return isinstance(value.__func__, FunctionType) and value.__func__.__module__ != nn.Module.__module__


@dataclass
class Stand:
    """Model, call and `zero_grad` behind a `Model`, renewed at each call of the user's function.

    own:       the user's model, which a strategy may have put inside another module
    model:     the program's;  call: what strategies made of its call
    zero_grad: of the optimizer
    called:    in this step
    keeps:     the last call's result is a result of the step;  returned: that result. Elsewhere it is not held: its
               autograd graph would outlive the step, and with it the stream of gradients, which a capture refuses
    """

    own: Any
    model: Any
    call: Callable[..., Any]
    zero_grad: Callable[..., Any]
    called: bool = False
    keeps: bool = False
    returned: Any = None

    def begin(self, program: Program, zero_grad: Callable[..., Any]) -> None:
        """Begin a call of the user's function."""
        self.model, self.call, self.zero_grad = program.model, program.call, zero_grad

    def owner(self, name: str) -> Any:
        """The module that has an attribute: the program's model, or the user's inside it."""
        inside = not hasattr(self.model, name) and any(module is self.own for module in self.model.modules())
        return self.own if inside else self.model


@dataclass(frozen=True)
class _Chained:
    """A method of torch's, as `train` and `to`. It returns the stand-in where it would return the model itself."""

    __wrapped__: Any
    stand_in: Model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.__wrapped__(*args, **kwargs)
        return self.stand_in if result is self.__wrapped__.__self__ else result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__wrapped__, name)


class Model:
    """A model whose call is what strategies made of it; attributes are the model's.

    Methods of the user's class run with this object as `self`: their calls of the model are the program's, too. It has
    one name of its own, `_optexp`: a user's model may have any other.
    """

    __class__ = property(lambda self: type(self._optexp.own))  # type: ignore[assignment]
    _optexp: Stand

    def __init__(self, program: Program, optimizer: Optimizer) -> None:
        stand = Stand(program.model, program.model, program.call, optimizer.zero_grad)
        object.__setattr__(self, "_optexp", stand)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stand = self._optexp
        result = stand.call(*args, **kwargs)
        stand.called, stand.returned = True, result if stand.keeps else None
        return result

    @property
    def zero_grad(self) -> Callable[..., Any]:
        return self._optexp.zero_grad

    def __iter__(self) -> Iterator[Any]:  # of a Sequential, a ModuleList or a ModuleDict
        return iter(self._optexp.owner("__iter__"))

    def __getitem__(self, key: Any) -> Any:
        return self._optexp.owner("__getitem__")[key]

    def __contains__(self, key: Any) -> bool:
        return key in self._optexp.owner("__contains__")

    def __len__(self) -> int:
        return len(self._optexp.owner("__len__"))

    def __bool__(self) -> bool:
        return bool(self._optexp.owner("__len__"))

    def __getattr__(self, name: str) -> Any:
        model = self._optexp.owner(name)
        value = getattr(model, name)
        if name == "forward" or not isinstance(value, MethodType) or value.__self__ is not model:
            return value
        return MethodType(value.__func__, self) if _is_users(value, model) else _Chained(value, self)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._optexp.owner(name), name, value)

    def __delattr__(self, name: str) -> None:
        delattr(self._optexp.owner(name), name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self._optexp.model, memo)
