"""The folder of files that later processes reuse."""

from __future__ import annotations

import os
from pathlib import Path


def kept(name: str) -> Path:
    """The file of this name in $XDG_CACHE_HOME/optexp, else in ~/.cache/optexp; its folder need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optexp" / name
