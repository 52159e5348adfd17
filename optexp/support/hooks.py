"""Modules whose calls can be watched."""

from __future__ import annotations

import torch
from torch import nn


def takes_hooks(module: nn.Module) -> bool:
    """Whether hooks of its forward can be registered from Python: TorchScript refuses them."""
    return not isinstance(module, torch.jit.ScriptModule)
