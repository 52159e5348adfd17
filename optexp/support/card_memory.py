"""A CUDA device's memory: sizes in bytes, and blocks that shift later tensors to other places."""

from __future__ import annotations

from random import Random

import torch

FEWEST, MOST = 1, 5  # blocks of memory that shift all later ones
SMALLEST, LARGEST = 2**21, 2**28  # bytes of such a block
FREE_SHARE = 1 / 64  # of free memory: largest such block


def l2_bytes(device: torch.device) -> int:
    """Size of the L2 cache."""
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def free_bytes(device: torch.device) -> int:
    """Memory that no process holds."""
    return int(torch.cuda.mem_get_info(device)[0])


def shifts(device: torch.device, random: Random) -> list[torch.Tensor]:
    """Blocks of memory of random number and sizes: what is allocated after them lies elsewhere."""
    largest = min(LARGEST, int(free_bytes(device) * FREE_SHARE)) if device.type == "cuda" else LARGEST
    sizes = [random.randint(min(SMALLEST, largest), largest) for _ in range(random.randint(FEWEST, MOST))]
    return [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
