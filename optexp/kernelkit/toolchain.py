"""Compilers for kernels: remedies where one is missing, compile threads, and torch.compile's counters."""

from __future__ import annotations

import os
import shutil
import sys
from collections import Counter
from importlib.util import find_spec
from typing import Any

import torch

from optexp.kernelkit.capability import TRITON
from optexp.kernelkit.dynamo_words import cause, last_frame, place, varied

_TORCH = os.path.dirname(torch.__file__) + os.sep


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


def end_compile_workers() -> None:
    """End Inductor's processes for compiling Triton code, and start no others: later compilations run in this process.

    The pool's main process first imports torch, which takes seconds: one that was started late would occupy a core
    while steps are timed. It is killed, because it accepts no request before the import ends.
    """
    workers = sys.modules.get("torch._inductor.async_compile")
    if workers is None:
        return
    for pool in workers._pool_set:
        if (process := getattr(pool, "process", None)) is not None:
            process.kill()
    workers.shutdown_compile_workers()
    config: Any = sys.modules["torch._inductor.config"]
    config.compile_threads = 1


def compile_threads() -> int | None:
    """Number of threads or processes in which Inductor compiles; None before Inductor is imported."""
    config: Any = sys.modules.get("torch._inductor.config")
    return None if config is None else int(config.compile_threads)


def allow_compile_threads(count: int | None) -> None:
    """Let Inductor compile in `count` threads or processes again; None: its own choice."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None:
        config.compile_threads = count or config.decide_compile_threads()


def counted() -> dict[str, float]:
    """torch.compile's counters of this process (graphs, breaks, recompiles), as "group/name".

    Dynamo's own counters for graph breaks ("graph_break", "unimplemented") name kinds but no lines. In their place come
    three groups from Dynamo's records:
    "graph_break": number of graphs that ended at a line, by "net.py:12 (Tensor.item())";
    "not_compiled": number of functions that Dynamo gave up at a line;
    "given_up": torch's limit of recompilations, by the varying value that reached it.
    """
    utilities = sys.modules.get("torch._dynamo.utils")
    if utilities is None:
        return {}
    found = {
        f"{group}/{name}": float(count)
        for group, values in utilities.counters.items()
        if group not in ("graph_break", "unimplemented")
        for name, count in values.items()
    }
    found |= Counter(f"graph_break/{text}" for text in map(_ended, list(utilities.graph_break_reasons)) if text)
    compiled = list(utilities.get_compilation_metrics())
    refused = [m for m in compiled if m.fail_user_frame_filename and "limit exceeded" not in (m.fail_reason or "")]
    found |= Counter(
        f"not_compiled/{place(m.fail_user_frame_filename, m.fail_user_frame_lineno)} ({cause(m.fail_reason or '')})"
        for m in refused
    )
    limited = [m.recompile_reason or "" for m in compiled if "limit exceeded" in (m.fail_reason or "")]
    limit = float(sys.modules["torch._dynamo.config"].recompile_limit) if limited else 0.0
    return found | {f"given_up/{_varied_at(reason)}": limit for reason in limited}


def _ended(reason: Any) -> str:
    """The line and cause of a graph break; "" without a line that is not torch's own, as those of an optimizer are."""
    return f"{place(frame.filename, frame.lineno)} ({cause(reason.reason)})" if (frame := _own(reason)) else ""


def _own(reason: Any) -> Any:
    """The innermost frame outside torch; None where there is none."""
    own = [frame for frame in reason.user_stack if not frame.filename.startswith(_TORCH)]
    return own[-1] if own else None


def _varied_at(reason: str) -> str:
    where = last_frame(reason)
    return f"{varied(reason)} ({where})" if where else varied(reason)
