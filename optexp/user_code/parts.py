"""The parts that a user's code gives, imported or unpacked."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optexp.errors import ConfigError
from optexp.user_code.adapters import Maker

CALLED = ("model", "batch", "optimizer")  # what a train_step is called with


@dataclass
class Parts:
    """The parts of a user's code: a model, the source of its batches, and, optionally, its training step.

    model():                              a new model
    inputs(dims, device):                 what one call of the model takes: tensors, and values that stay the same
    loader():                             the batches of the user's own training loop; instead of `inputs`
    loss(outputs, batch):                 a scalar
    optimizer(parameters):                an optimizer
    train_step(model, batch, optimizer):  one optimizer step; instead of loss, backward and step
    """

    model: Maker
    inputs: Callable[[Mapping[str, int], torch.device], Any] | None = None
    loader: Callable[[], Any] | None = None
    loss: Callable[[Any, Any], Tensor] | None = None
    optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None
    train_step: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        """Raises ConfigError where `train_step` takes other arguments."""
        if self.train_step is None:
            return
        try:
            takes = inspect.signature(self.train_step)
        except (TypeError, ValueError):  # no function, or one in C: left to the call
            return
        try:
            takes.bind(*CALLED)
        except TypeError:
            plain = takes.replace(return_annotation=inspect.Signature.empty)
            raise ConfigError(f"train_step takes {plain}: it is called as train_step({', '.join(CALLED)})") from None
