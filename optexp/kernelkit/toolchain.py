"""What compiles kernels here, what to install where it is missing, and what it counted."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

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


def counted() -> dict[str, float]:
    """What torch.compile counted so far in this process (graphs, breaks, recompiles), as "group/name".

    In the group "graph_break_at" are the lines from which code went on after a break, as "file.py:12".
    """
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is None:
        return {}
    found = {f"{group}/{name}": float(n) for group, values in utilities.counters.items() for name, n in values.items()}
    compiled = ((m.co_filename, m.co_name) for m in utilities.get_compilation_metrics())
    lines = ((file, RESUMED.search(name or "")) for file, name in compiled)
    return found | Counter(f"graph_break_at/{Path(file).name}:{line[1]}" for file, line in lines if line)


RESUMED = re.compile(r"^torch_dynamo_resume_in_.*_at_(\d+)$")  # how dynamo calls what comes after a break
