"""A model of someone who asks PyTorch for deterministic algorithms."""

from __future__ import annotations

import torch
from torch import Tensor, nn

torch.use_deterministic_algorithms(True)


class Model(nn.GELU):
    pass


def get_inputs() -> list[Tensor]:
    return [torch.randn(64, 256)]
