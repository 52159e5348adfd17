"""The part of a GPU's L2 cache that a program may set aside; data in it survives a flush.

Source: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__CTX.html (cuCtxSetLimit, cuCtxResetPersistingL2Cache).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache

PERSISTING_L2_CACHE_SIZE = 0x06  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE


def give_up() -> None:
    """End persistence in the current context: cached lines become normal ones, and no part of the cache is set aside.

    Does nothing where device or driver do not support it.
    """
    if (reset := _function("cuCtxResetPersistingL2Cache")) is not None:
        reset()
    if (limit := _function("cuCtxSetLimit")) is not None:
        limit(ctypes.c_uint(PERSISTING_L2_CACHE_SIZE), ctypes.c_size_t(0))


def set_aside() -> int:
    """Bytes of the cache that are set aside; 0 where the driver does not report it."""
    size, limit = ctypes.c_size_t(0), _function("cuCtxGetLimit")
    if limit is None or limit(ctypes.byref(size), ctypes.c_uint(PERSISTING_L2_CACHE_SIZE)):
        return 0
    return size.value


@cache
def _function(name: str) -> Callable[..., int] | None:
    try:
        function: Callable[..., int] = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None
    return function
