"""Plain autocast, as a careful user would write it: the yardstick of a PRECISION contract.

Written by the core on purpose, and not shared with any strategy: a mistake in one is not repeated in the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from optexp.equivalence.int8 import rounded_to_int8
from optexp.program import Batch, Program


def autocast(program: Program, dtype: str) -> Program:
    """The program with forward and loss in `dtype` ("bfloat16", "float16", "tf32"; "int8" for inference).

    float16 with gradients gets a GradScaler. "tf32" sets this process's flags: it belongs in an arm of its own.
    """
    if dtype == "tf32":
        torch.backends.cuda.matmul.allow_tf32 = True
        torch.backends.cudnn.allow_tf32 = True
        return program
    if dtype == "int8":
        return rounded_to_int8(program)
    device, narrow = program.device, getattr(torch, dtype)
    call, inner_loss = program.call, program.loss

    def forward(*args: Any, **kwargs: Any) -> Any:
        with torch.autocast(device.type, narrow):
            return call(*args, **kwargs)

    def loss(output: Any, batch: Batch) -> Tensor:
        assert inner_loss is not None
        with torch.autocast(device.type, narrow):
            return inner_loss(output, batch)

    scaler = None
    if narrow is torch.float16 and inner_loss:
        scaler = torch.amp.GradScaler(device.type)
        scaler.scale(torch.zeros((), device=device))  # makes its state now, so that it is restored and compared
    return replace(program, forward=forward, loss=loss if inner_loss else None, scaler=scaler)
