"""The lengths of sequences that a CTC loss takes. Below a dispatch mode torch computes with them as tensors, which must
be on the device of the loss; outside of any mode it reads them as numbers, from whichever device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

CTC = (torch.ctc_loss, torch.nn.functional.ctc_loss)
_LENGTHS = {"input_lengths": 2, "target_lengths": 3}  # positions among the arguments


def on_one_device(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a call of `CTC`, in which lengths are on the device of the loss."""
    moved, named = list(args), dict(kwargs)
    device = (args[0] if args else kwargs["log_probs"]).device
    for name, place in _LENGTHS.items():
        if name in named:
            named[name] = _on(named[name], device)
        elif place < len(moved):
            moved[place] = _on(moved[place], device)
    return moved, named


def _on(lengths: Any, device: torch.device) -> Any:
    return lengths.to(device) if isinstance(lengths, Tensor) else lengths
