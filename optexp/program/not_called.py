"""The optimizer of a program whose step has optimizers of its own, or updates parameters by hand."""

from __future__ import annotations

import torch


class NotCalled(torch.optim.SGD):
    """An optimizer without parameters of the model; no step calls it, as the step's own optimizers update the model.

    by_hand: no optimizer does, but assignments such as `p.data.add_(p.grad, alpha=-lr)`
    """

    def __init__(self) -> None:
        super().__init__([torch.zeros(())], lr=0.0)
        self.by_hand = False
