"""Errors of torch's compiler, on a program that runs without it."""

from __future__ import annotations

import sys
from pathlib import Path
from traceback import walk_tb

from optexp.support.shortage import is_shortage

MODULES = ("torch._dynamo.exc", "torch._inductor.exc")
COMPILING = str(Path("torch", "_dynamo", "convert_frame.py"))  # below it, no frame of the program runs


def of_compiler(error: Exception) -> str | None:
    """First line of an error that the compiler raised, or code that it generated; None for others.

    That memory ran out, or that a file of the machine is broken, says nothing about the compiler.
    """
    inner = getattr(error, "inner_exception", error)
    if is_shortage(inner) or isinstance(inner, (MemoryError, OSError, ImportError)):
        return None
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    folders = getattr(sys.modules.get("torch._inductor.runtime.cache_dir_utils"), "cache_dir", None)
    generated = bool(folders and frames and frames[-1].startswith(folders()))
    compiling = any(frame.endswith(COMPILING) for frame in frames)
    if not (generated or compiling or type(error).__module__ in MODULES):
        return None
    return f"{type(inner).__name__}: {str(inner).strip().partition(chr(10))[0]}"
