"""The optimizer of a program whose step has optimizers of its own."""

from __future__ import annotations

import torch


class NotCalled(torch.optim.SGD):
    """An optimizer without parameters of the model; no step calls it, as the step's own optimizers update the model."""

    def __init__(self) -> None:
        super().__init__([torch.zeros(())], lr=0.0)
