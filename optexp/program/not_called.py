"""The optimizer of a program whose step has optimizers of its own."""

from __future__ import annotations

import torch


class NotCalled(torch.optim.SGD):
    """An optimizer over no parameter of the model, which no step calls: updates are by other means."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(())], lr=0.0)
