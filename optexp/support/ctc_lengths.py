"""The lengths of sequences that a CTC loss takes: below a dispatch mode they must be on the device of the loss."""

from __future__ import annotations

from typing import Any

import torch

_FIRST = {torch.ops.aten._ctc_loss.Tensor: 0, torch.ops.aten._ctc_loss_backward.Tensor: 1}  # position of log_probs


def on_one_device(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of an operator. Outside of any mode torch reads the lengths as numbers, from whichever device."""
    first = _FIRST.get(func)
    if first is None:
        return args
    device, lengths = args[first].device, slice(first + 2, first + 4)
    return *args[: lengths.start], *(length.to(device) for length in args[lengths]), *args[lengths.stop :]
