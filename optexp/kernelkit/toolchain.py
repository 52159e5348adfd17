"""The compilers of kernels: the remedy where one is missing, and torch.compile's counters."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import torch

from optexp.kernelkit.capability import TRITON


def missing(device: torch.device, triton: bool = False) -> str | None:
    """The reason why torch.compile (or only Triton) cannot run here, with its remedy; None where it can."""
    if find_spec("triton") is None and (device.type == "cuda" or triton):
        return "fused kernels are written in Triton, and triton is not installed: pip install triton"
    if device.type == "cpu" and not triton:
        compiler = os.environ.get("CXX", "g++")
        if shutil.which(compiler) is None:
            return f"torch.compile needs a C++ compiler on a CPU, and {compiler} was not found: install g++"
    if device.type == "cuda":
        if not any(map(shutil.which, (os.environ.get("CC", "cc"), "gcc", "clang"))):
            return "Triton needs a C compiler, and none was found: install gcc"
        if not TRITON.met_by(device):
            return f"Triton needs compute capability {TRITON}, and {torch.cuda.get_device_name(device)} is older"
    return None


def counted() -> dict[str, float]:
    """torch.compile's counters of this process (graphs, breaks, recompiles), as "group/name".

    In the group "graph_break_at" are the lines from which code went on after a break, as "file.py:12"; in the group
    "given_up" what was compiled anew so often that the rest runs uncompiled, with the limit of times.
    """
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is None:
        return {}
    found = {f"{group}/{name}": float(n) for group, values in utilities.counters.items() for name, n in values.items()}
    compiled = list(utilities.get_compilation_metrics())
    lines = ((m.co_filename, RESUMED.search(m.co_name or "")) for m in compiled)
    found |= Counter(f"graph_break_at/{Path(file).name}:{line[1]}" for file, line in lines if line)
    limited = [m.recompile_reason or "" for m in compiled if "limit exceeded" in (m.fail_reason or "")]
    limit = float(sys.modules["torch._dynamo.config"].recompile_limit) if limited else 0.0
    return found | {f"given_up/{varied(reason)}": limit for reason in limited}


def varied(reason: str) -> str:
    """The varying thing that a guard names: from "self.position == 7" or "tensor 'tokens' size mismatch at"."""
    text = re.sub(r"L\['(\w+)'\]", r"\1", reason.partition(": ")[2].splitlines()[0] if ": " in reason else reason)
    if found := re.match(r"tensor '(.+?)' (size|stride|dtype|rank)", text):
        return f"{found[2]} of {found[1]}"
    if found := re.match(r"([\w.\[\]'\"]+) (?:==|is|in) ", text):
        return f"value of {found[1]}"
    return text.partition("  ")[0].strip() or "call"


RESUMED = re.compile(r"^torch_dynamo_resume_in_.*_at_(\d+)$")  # how dynamo calls what comes after a break
