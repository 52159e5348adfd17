"""What compiles kernels here, and what to install where it is missing."""

from __future__ import annotations

import os
import shutil
from importlib.util import find_spec

import torch


def missing(device: torch.device, triton: bool = False) -> str | None:
    """What stands in the way of torch.compile (of Triton, where only that is asked for); None where nothing does."""
    if find_spec("triton") is None and (device.type == "cuda" or triton):
        return "fused kernels are written in Triton, and triton is not installed: pip install triton"
    if device.type == "cpu" and not triton:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return f"torch.compile needs a C++ compiler on a CPU, and {compiler} was not found: install g++"
    if device.type == "cuda":
        if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
            return "Triton needs a C compiler, and none was found: install gcc"
        if torch.cuda.get_device_capability(device) < (7, 0):
            return f"Triton needs compute capability 7.0, and {torch.cuda.get_device_name(device)} is older"
    return None
