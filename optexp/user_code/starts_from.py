"""Optimizations that a script has already: the baseline has them too."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from optexp.user_code.script_run import Reached
from optexp.user_code.script_step import FirstCall


def starts_from(reached: Reached, first: FirstCall) -> list[str]:
    """Names of the optimizations, in words.

    Args:
        reached: The script at its mark.
        first: The model's first call in a step.
    """
    mark, found = reached.mark, list[str]()
    if compiled(mark.model):
        found.append("torch.compile")
    if first.autocast is not None:
        found.append(f"autocast to {str(first.autocast).removeprefix('torch.')}")
    if reached.ambient.inference:
        found.append("inference mode")
    found += _of_optimizer(reached.optimizer)
    if any(p.dim() == 4 and not p.is_contiguous() and _last(p) for p in mark.model.parameters()):
        found.append("channels_last weights")
    if isinstance(mark.source, DataLoader):
        found += ["pinned memory"] * mark.source.pin_memory
        found += [f"{mark.source.num_workers} loader workers"] * bool(mark.source.num_workers)
    if torch.get_float32_matmul_precision() != "highest":
        found.append(f"float32 matmul precision {torch.get_float32_matmul_precision()}")
    return found + ["cudnn.benchmark"] * torch.backends.cudnn.benchmark


def compiled(model: nn.Module) -> bool:
    """Whether a call of the model, or of a part, runs compiled code."""
    return any(
        hasattr(module, "_orig_mod")
        or getattr(module, "_compiled_call_impl", None) is not None
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in model.modules()
    )


def _of_optimizer(optimizer: Any) -> list[str]:
    groups = optimizer.param_groups if optimizer is not None else []
    if hasattr(getattr(optimizer, "step", None), "_torchdynamo_orig_callable"):
        return ["a compiled optimizer"]
    return ["a fused optimizer"] * any(group.get("fused") for group in groups)


def _last(weight: torch.Tensor) -> bool:
    return weight.is_contiguous(memory_format=torch.channels_last)
