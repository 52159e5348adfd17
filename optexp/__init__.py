"""optexp: declarative optimization experiments for PyTorch, with evidence."""

from pathlib import Path

__version__ = "0.1.0"

# `optexp.strategies`, `optexp.kernels`, `optexp.experiments` and `optexp.conf` are folders beside this one in a
# checkout and folders inside this one in an installed wheel. Top-level packages of those names would collide with
# others' (Hugging Face ships a `kernels`), so they only ever exist below `optexp`.
_root = Path(__file__).resolve().parent.parent
if (_root / "conf" / "config.yaml").is_file() and (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))
