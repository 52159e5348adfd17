"""Model and optimizer of a mark that names none: the only ones among the script's variables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from types import FrameType, FunctionType
from typing import Any

import torch
from torch import nn

from optexp.errors import ConfigError
from optexp.python_state.slots import is_skeleton
from optexp.support.marks import Mark
from optexp.user_code.loose_tensors import loose_tensors


def with_implied(mark: Mark, frame: FrameType, path: str, body: Callable[[], FunctionType]) -> Mark:
    """The mark with the one model of its frame's variables, and with the one optimizer where gradients are on.

    Of a script without modules, the tensors that it trains are the model.

    Args:
        body: Makes the marked body, as a function over the script's variables.

    Raises:
        ConfigError: there is no model, or there are several models or optimizers.
    """
    if mark.model is not None:
        return mark
    known = {**frame.f_globals, **frame.f_locals}
    model = _only(known, "model", _learns, path)
    optimizer = mark.optimizer
    if optimizer is None and torch.is_grad_enabled():
        optimizer = _only(known, "optimizer", lambda value: isinstance(value, torch.optim.Optimizer), path)
    model = loose_tensors(body(), optimizer) if model is None else model
    if model is None:
        raise ConfigError(f"{path}: the mark names no model, and no variable holds one: {EXAMPLE}")
    return replace(mark, model=model, optimizer=optimizer)


def _learns(value: Any) -> bool:
    return isinstance(value, nn.Module) and any(True for _ in value.parameters()) and not is_skeleton(value)


EXAMPLE = "optexp.step(model=model, optimizer=optimizer), or optexp.steps(loader, model=model, optimizer=optimizer)"


def _only(known: Mapping[str, Any], kind: str, is_one: Callable[[Any], bool], path: str) -> Any:
    names = {id(value): name for name, value in known.items() if is_one(value)}
    if len(names) > 1:
        *others, last = sorted(names.values())
        raise ConfigError(
            f"{path}: the mark names no {kind}, and there are several ({', '.join(others)} and {last}): name it, as in"
            f" {EXAMPLE}"
        )
    return next((known[name] for name in names.values()), None)
