"""Bytecode of torch, kept where Python may not write it beside torch: else each process compiles all of its sources.

A container often sets PYTHONDONTWRITEBYTECODE and holds a torch that was installed without bytecode. Importing torch
then takes three times as long, and a comparison imports it in several processes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import cache
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from optexp.support.cache import kept

PREFIX, FORBIDDEN = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def keep() -> None:
    """Let this process, and those it starts, keep bytecode in optexp's cache folder if torch has none and gets none."""
    for_others = environment(os.environ)
    if PREFIX in for_others and sys.pycache_prefix is None:
        sys.pycache_prefix, sys.dont_write_bytecode = for_others[PREFIX], False
        os.environ[PREFIX] = for_others[PREFIX]
        os.environ.pop(FORBIDDEN, None)


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """These variables of a process that imports torch, so that it keeps bytecode."""
    if sys.pycache_prefix is not None or not _missing():
        return dict(variables)
    return {name: value for name, value in variables.items() if name != FORBIDDEN} | {PREFIX: str(kept("bytecode"))}


@cache
def _missing() -> bool:
    """Whether torch has no bytecode, and Python will write none beside it."""
    torch = find_spec("torch")
    if torch is None or torch.origin is None or Path(cache_from_source(torch.origin)).exists():
        return False
    return sys.dont_write_bytecode or not os.access(Path(torch.origin).parent, os.W_OK)
