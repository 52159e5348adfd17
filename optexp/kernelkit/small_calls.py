"""A C++ test of whether a call is small: of a call of 6 µs, the same test in Python takes a tenth.

It is compiled once for each version of torch and of Python, in ten seconds, and cached. Without it, Python tests.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch.compiler import substitute_in_graph

from optexp.kernelkit.launching import INTERPRETED, NVIDIA
from optexp.support.cache import kept

SOURCE = Path(__file__).with_suffix(".cpp")
LIBRARIES = ("torch_python", "torch_cpu", "c10")

Function = TypeVar("Function", bound=Callable[..., Any])


def quick(function: Function) -> Function:
    """The function with a C++ front that answers clear cases faster; torch.compile sees only the function."""
    front = _front()
    return function if front is None else in_front_of(function, front)


def in_front_of(function: Function, front: ModuleType) -> Function:
    answer: Function = front.quick(function)
    substitute_in_graph(answer)(function)
    return answer


@cache
def _front() -> ModuleType | None:
    if not NVIDIA or INTERPRETED or not torch.cuda.device_count():
        return None
    try:
        return compiled("CUDA")
    except Exception as error:  # any failure only costs time
        reason = getattr(error, "stderr", None) or error
        logging.getLogger(__name__).info("small calls take 0.5 µs longer, as C++ could not be built: %s", reason)
        return None


def compiled(device: str) -> ModuleType:
    """The module built from small_calls.cpp, from the cache or by the C++ compiler.

    Processes that start together each build it, without a lock. A library that cannot be imported is deleted, and the
    next process builds it again.

    device:  "CUDA", or "CPU" for tests

    Raises:
        OSError, SubprocessError: There is no compiler, or it fails.
        ImportError: The library cannot be imported.
    """
    torch_home = Path(torch.__file__).parent
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-O2", "-std=c++20", "-shared", "-fPIC"]
    command += [f"-DDEVICE={device}"]
    command += ["-isystem", sysconfig.get_path("include"), "-isystem", str(torch_home / "include"), str(SOURCE)]
    command += [f"-L{torch_home / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
    key = hashlib.sha256("\n".join([*command, torch.__version__, sys.version, SOURCE.read_text()]).encode())
    library = kept(f"small_calls-{key.hexdigest()[:16]}.so")
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=library.parent) as folder:
            built = Path(folder) / library.name
            how: dict[str, Any] = {"capture_output": True, "text": True, "errors": "replace", "timeout": 300}
            subprocess.run([*command, "-o", str(built)], check=True, **how)
            built.replace(library)
    specification = spec_from_file_location("small_calls", library)
    if specification is None or specification.loader is None:
        raise ImportError(f"{library} cannot be imported")
    try:
        module = module_from_spec(specification)
        specification.loader.exec_module(module)
    except ImportError:
        library.unlink(missing_ok=True)
        raise
    return module
