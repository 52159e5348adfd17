"""optexp: declarative optimization experiments for PyTorch, with evidence."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from optexp.api import compare
    from optexp.support.marks import step, steps
    from optexp.support.ranges import region

__all__ = ["compare", "region", "step", "steps"]
__version__ = "0.1.0"

# `optexp.strategies`, `optexp.kernels`, `optexp.experiments` and `optexp.conf` are folders beside this one in a
# checkout and folders inside this one in an installed wheel. Top-level packages of those names would collide with
# others' (Hugging Face ships a `kernels`), so they only ever exist below `optexp`.
_root = Path(__file__).resolve().parent.parent
if (_root / "conf" / "config.yaml").is_file() and (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))


def __getattr__(name: str) -> Any:
    """`optexp.compare` and `optexp.region` import torch when they are asked for, and not before; marks need none."""
    if name == "compare":
        from optexp.api import compare

        return compare
    if name == "region":
        from optexp.support.ranges import region

        globals()[name] = region  # looked up once: a step may ask for it often
        return region
    if name in ("step", "steps"):
        from optexp.support import marks

        globals()[name] = getattr(marks, name)
        return globals()[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
