"""The compilers of kernels: the remedy where one is missing, and torch.compile's counters."""

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
    """End the processes in which Inductor compiles Triton code beside this one, and start no others.

    The first of them begins with an import of torch, which takes seconds; one that was started last would still be at
    it, on a core of its own, while steps are timed. It is killed, because it takes no order before that import ends.
    Whatever is compiled later is compiled in this process.
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
    """Threads or processes that Inductor compiles in; None before it was imported."""
    config: Any = sys.modules.get("torch._inductor.config")
    return None if config is None else int(config.compile_threads)


def allow_compile_threads(count: int | None) -> None:
    """Let Inductor compile in so many again; None: as many as it decides on."""
    config: Any = sys.modules.get("torch._inductor.config")
    if config is not None:
        config.compile_threads = count or config.decide_compile_threads()


def counted() -> dict[str, float]:
    """torch.compile's counters of this process (graphs, breaks, recompiles), as "group/name".

    Four groups are made from Dynamo's records, whose own counters name a graph break "graph_break" or "unimplemented"
    by its kind, and no line. "graph_break": lines at which a graph ended, as "net.py:12 (Tensor.item())", by the
    number of graphs that ended there. "not_compiled": lines at which Dynamo gave a whole function up. "given_up": what
    was compiled anew so often that the rest runs uncompiled, with the limit of times. "unimplemented" is left out.
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
    """A reason that a graph ended, with its line; "" for one without a line."""
    return f"{place(frame.filename, frame.lineno)} ({cause(reason.reason)})" if (frame := _own(reason)) else ""


def _own(reason: Any) -> Any:
    """The innermost frame outside torch, else the innermost; None where there is no frame."""
    own = [frame for frame in reason.user_stack if not frame.filename.startswith(_TORCH)]
    return (own or list(reason.user_stack) or [None])[-1]


def _varied_at(reason: str) -> str:
    where = last_frame(reason)
    return f"{varied(reason)} ({where})" if where else varied(reason)
