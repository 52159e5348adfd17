"""torch counts GPUs by NVML: CUDA's own count would start CUDA in a process that only looks."""

from __future__ import annotations

import os

SETTING = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # variables of a process


def count_by_nvml() -> None:
    """Count so in this process from now on, unless its user has set otherwise."""
    for name, value in SETTING.items():
        os.environ.setdefault(name, value)
