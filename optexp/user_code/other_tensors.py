"""State that an optimizer keeps for tensors that are not the model's: those of a second network, an image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from optexp.program import first, first_value, rate_of
from optexp.python_state.slots import Slot


def other_tensors(optimizer: Optimizer, model: nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Tensors that an optimizer updates and the model does not hold, with their learning rates."""
    own = set(map(id, model.parameters()))
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if id(tensor) not in own:
                yield tensor, rate_of(group)


def state_slots(optimizer: Optimizer, model: nn.Module) -> Iterator[Slot]:
    """One for each of the other tensors; the state may not be there before the first step."""
    for index, (tensor, rate) in enumerate(other_tensors(optimizer, model)):
        read = partial(_read, optimizer, tensor)
        yield Slot(f"optimizer.state[{index}]", [tensor], read, partial(_write, optimizer, tensor, rate))


def _read(optimizer: Optimizer, tensor: Tensor) -> dict[str, Any]:
    return dict(optimizer.state.get(tensor, {}))


@torch.no_grad()
def _write(optimizer: Optimizer, tensor: Tensor, rate: float, saved: Mapping[str, Any]) -> None:
    """Restore into the same memory; state that was made since gets its initial values."""
    state = optimizer.state.get(tensor, {})
    for key, value in state.items():
        new = saved[key] if key in saved else first(optimizer, tensor, key)
        if not isinstance(value, Tensor):
            number = isinstance(value, (int, float))
            state[key] = new if new is not None or key in saved else type(value)() if number else value
        elif not isinstance(new, Tensor):
            value.copy_(first_value(key, value, rate))
        elif value.shape == new.shape:
            value.copy_(new)
        else:
            state[key] = new.to(value)
    missing = {key: value for key, value in saved.items() if key not in state}
    if missing:
        optimizer.state[tensor].update(missing)
