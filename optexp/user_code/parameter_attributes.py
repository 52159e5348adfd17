"""Attributes that a user's step gives to parameters, as `p.momentum`: state that no module and no variable holds."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from optexp.python_state.slots import slots
from optexp.python_state.variables import MISSING, Place
from optexp.user_code.step_state import TrackedStepState


def follow_attributes(state: TrackedStepState, model: nn.Module) -> None:
    """Follow what trial calls of a step left there, which is removed. Names with an underscore are torch's own."""
    for path, parameter in model.named_parameters():
        for name in [name for name in vars(parameter) if not name.startswith("_")]:
            delattr(parameter, name)
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
