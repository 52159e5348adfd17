"""Errors of an optimizer that is not torch's, whose numbers a strategy has moved to tensors on the device."""

from __future__ import annotations

from traceback import walk_tb

from torch import nn
from torch.optim import Optimizer

from optexp.support.shortage import is_shortage


def of_own_optimizer(error: Exception) -> str | None:
    """Name of such an optimizer and first line of the error, where its own code raised it; None for others."""
    inner = None
    for frame, _ in walk_tb(error.__traceback__):
        called = frame.f_locals.get("self")
        inner = called if isinstance(called, (Optimizer, nn.Module)) else inner
    if not isinstance(inner, Optimizer) or type(inner).__module__.startswith("torch.") or is_shortage(error):
        return None
    line = str(error).strip().partition("\n")[0]
    return f"{type(inner).__name__} fails with them ({type(error).__name__}: {line})"
