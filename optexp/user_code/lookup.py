"""Lookup of a user's name: `package.module:Name`, or `file.py:Name` with the file imported as if started there."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from optexp.errors import ConfigError
from optexp.schema import suggest
from optexp.user_code.bound_names import missing
from optexp.user_code.importing import as_script, import_file, imported, require_file
from optexp.user_code.named_files import source


def find(target: str, key: str) -> Any:
    """The object behind a target.

    Args:
        target: package.module:name, package.module.name or folder/file.py:name.
        key: The option that names it, for messages.

    Raises:
        ConfigError: the target does not exist.
    """
    place, _, name = target.rpartition(":") if ":" in target else target.rpartition(".")
    if not place or target.endswith(".py"):
        raise ConfigError(f"{key}={target} names nothing in it: write package.module:Name or folder/file.py:Name")
    if place.endswith(".py"):
        found: Any = import_file(Path(place).expanduser(), key)
    else:
        with as_script(source(target) or Path(place), f"{key}={target}"):
            found = _import(place, f"{key}={target}")
    for part in name.split("."):
        if not hasattr(found, part):
            names = models_in(found) or [name for name in dir(found) if not name.startswith("_")]
            raise ConfigError(f"{key}={target}: {place} has no {part!r}{suggest(part, names)}")
        found = getattr(found, part)
    return found


def require_place(target: str, key: str) -> None:
    """Raises ConfigError where the file of a target does not exist, its package is not there, or the file cannot bind
    its name; imports nothing."""
    place, _, name = target.rpartition(":" if ":" in target else ".")
    top = place.partition(".")[0]
    if place.endswith(".py"):
        require_file(Path(place).expanduser(), key)
    elif top and top not in sys.modules and importlib.util.find_spec(top) is None:
        raise ConfigError(_no_module(f"{key}={target}", top))
    file, first = source(target), name.partition(".")[0]
    if file is not None and (names := missing(file, first)) is not None:
        raise ConfigError(f"{key}={target}: {place} has no {first!r}{suggest(first, names)}")


def _no_module(asked: str, name: str | None) -> str:
    return f"{asked}: there is no module {name!r} here; start in the folder that holds it, or set PYTHONPATH"


def _import(name: str, asked: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # the user's module is there, something that it imports is not
        raise ConfigError(_no_module(asked, error.name)) from None


def spelled(target: str, variable: str) -> tuple[str, str]:
    """Lines that import the module of a found target as `variable`, and the target's name in it."""
    place, _, name = target.rpartition(":") if ":" in target else target.rpartition(".")
    here, displaced = Path.cwd(), list[str]()
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        known = imported(path, variable)
        place, folder, script, displaced = known.place.name, known.place.root, str(path), known.displaced
    else:
        folder, script = here, str(getattr(sys.modules[place], "__file__", None) or "")
        if not script.startswith(f"{here}/"):
            return f"import importlib\n\n{variable} = importlib.import_module({place!r})", name
    dropped = f"for other in {displaced!r}:  # of another folder\n    sys.modules.pop(other, None)\n" * bool(displaced)
    lines = f'''\
import importlib
import sys

sys.path.insert(0, "{folder}")
arguments, sys.argv[:] = sys.argv[:], ["{script}"]
{dropped}{variable} = importlib.import_module({place!r})
sys.argv[:] = arguments'''
    return lines, name


def models_in(place: Any) -> list[str]:
    """Models, and their classes, that a module defines."""
    return [
        name
        for name, value in vars(place).items()
        if isinstance(value, nn.Module)
        or (isinstance(value, type) and issubclass(value, nn.Module) and value.__module__.startswith(place.__name__))
    ]
