"""Whether an error says that a device's memory ran out: torch's class for it is of its own allocator alone."""

from __future__ import annotations

OUT_OF_MEMORY = "OutOfMemoryError"  # torch's class, by name: the command line does without torch
SAYINGS = ("CUDA error: out of memory", "_ALLOC_FAILED")  # of the driver; of cuBLAS, cuDNN, cuFFT and cuSPARSE


def is_shortage(error: BaseException) -> bool:
    """Whether memory of a device ran out, in torch or in a library that it calls."""
    if type(error).__name__ == OUT_OF_MEMORY:
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in SAYINGS)
