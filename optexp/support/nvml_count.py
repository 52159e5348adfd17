"""Let torch count GPUs by NVML: CUDA's own count would initialize CUDA in a process that only counts."""

from __future__ import annotations

import os

SETTING = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}  # variables of a process


def count_by_nvml() -> None:
    """Count GPUs by NVML in this process from now on, unless the user has set the variable."""
    for name, value in SETTING.items():
        os.environ.setdefault(name, value)
