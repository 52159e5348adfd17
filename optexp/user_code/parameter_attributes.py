"""Attributes of parameters, as `p.momentum` of an update by hand: state that no module and no variable holds."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from numbers import Number
from typing import Any

from torch import Tensor, nn

from optexp.python_state.slots import slots
from optexp.python_state.variables import MISSING, Place
from optexp.user_code.step_state import TrackedStepState

Attributes = Mapping[str, Mapping[str, Any]]  # by the parameter's name


def attributes(model: nn.Module) -> Attributes:
    """Those of every parameter, but for names with an underscore, which are torch's own."""
    return {
        path: {name: value for name, value in vars(parameter).items() if not name.startswith("_")}
        for path, parameter in model.named_parameters()
    }


def follow_attributes(state: TrackedStepState, model: nn.Module, before: Attributes) -> None:
    """Follow what steps give to parameters, and numbers and tensors that were there.

    before: attributes before the trial calls of a step; what these left is removed
    """
    parameters = dict(model.named_parameters())
    for path, held in attributes(model).items():
        parameter = parameters[path]
        for name, value in held.items():
            if name not in before.get(path, ()):
                delattr(parameter, name)
            elif not isinstance(value, (Number, Tensor)):  # a mark of the user's own, as for another tool
                continue
            place = Place(f"{path}.{name}", partial(_get, parameter, name), partial(_put, parameter, name))
            for slot in slots(place, frozenset()):
                state.track(slot)


def _get(parameter: nn.Parameter, name: str) -> Any:
    return vars(parameter).get(name, MISSING)


def _put(parameter: nn.Parameter, name: str, value: Any) -> None:
    if value is not MISSING:
        setattr(parameter, name, value)
    elif hasattr(parameter, name):
        delattr(parameter, name)
