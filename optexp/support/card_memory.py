"""Sizes of a CUDA device's memory, in bytes."""

from __future__ import annotations

import torch


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def free_bytes(device: torch.device) -> int:
    """Memory that no process holds."""
    return int(torch.cuda.mem_get_info(device)[0])
