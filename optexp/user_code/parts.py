"""What a user's code gives, imported or unpacked."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from optexp.user_code.adapters import Maker


@dataclass
class Parts:
    """What a user's code gives: a model, where its batches come from, and, if they like, how it learns.

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
