"""Unified memory: tensors that host and GPU share, whose pages move to the side that touches them."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from optexp.errors import Unsupported
from optexp.support.card_memory import free_bytes

SHARE = 0.05  # of the card's free memory, at most: beyond what is free, pages move for ever
ATTACH_GLOBAL = 1  # any stream may use it
TYPES = {torch.float32: "<f4", torch.float16: "<f2", torch.float64: "<f8"}


class _Managed:
    """Memory of the driver that torch reads by `__cuda_array_interface__`; freed with the last tensor on it."""

    def __init__(self, like: Tensor) -> None:
        driver = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_uint64()
        size = ctypes.c_size_t(like.nbytes)
        status = driver.cuMemAllocManaged(ctypes.byref(pointer), size, ctypes.c_uint(ATTACH_GLOBAL))
        if status:
            raise Unsupported(f"the driver gave no unified memory (error {status}): leave workload.variant=unified out")
        self.driver, self.pointer = driver, pointer.value
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(like.shape),
            "typestr": TYPES[like.dtype],
            "data": (self.pointer, False),
            "version": 3,
        }

    def __del__(self) -> None:
        if hasattr(self, "pointer"):
            self.driver.cuMemFree_v2(ctypes.c_uint64(self.pointer))


def managed(tensor: Tensor) -> Tensor:
    """A copy of a tensor on a GPU in unified memory.

    Raises:
        Unsupported: It is too large, of another dtype, or the driver has no unified memory.
    """
    if tensor.dtype not in TYPES:
        raise Unsupported(f"unified memory serves {', '.join(map(str, TYPES))} here, and not {tensor.dtype}")
    free = free_bytes(tensor.device)
    refuse_large(tensor.nbytes, free)
    with torch.cuda.device(tensor.device):
        shared = torch.as_tensor(_Managed(tensor), device=tensor.device)
    return shared.copy_(tensor)


def refuse_large(size: int, free: int) -> None:
    """Raise Unsupported where a tensor of `size` bytes takes more than a small part of the `free` ones."""
    if size > SHARE * free:
        raise Unsupported(
            f"{size / 2**20:.0f} MiB of unified memory are more than {SHARE:.0%} of the {free / 2**20:.0f} MiB that are"
            " free on the card: make workload.size smaller"
        )
