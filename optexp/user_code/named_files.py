"""Python files that options name, read without an import. Needs no torch."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optexp.errors import ConfigError
from optexp.user_code.bound_names import INSTALLED

NAMING = ("path", "target")  # options that name a file, a name in one, or a name in a module


def require_syntax(options: Any) -> None:
    """Return where every file of the user's that options name can be compiled, or is not there.

    Args:
        options: Nested as in the configuration.

    Raises:
        ConfigError: one cannot; with its line.
    """
    for file in dict.fromkeys(named(options)):
        if str(file.resolve()).startswith(INSTALLED):
            continue
        try:
            with warnings.catch_warnings(action="ignore"):  # importing it says them
                compile(file.read_bytes(), str(file), "exec", dont_inherit=True)
        except SyntaxError as error:
            line = f", in `{error.text.strip()}`" if error.text and error.text.strip() else ""
            shown = file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file
            raise ConfigError(f"{shown}:{error.lineno}: {type(error).__name__}: {error.msg}{line}") from None
        except (ValueError, OSError, RecursionError, MemoryError):  # importing it says why
            continue


def named(options: Any) -> Iterator[Path]:
    """Files that options name, those of other people's packages included."""
    if isinstance(options, Mapping):
        for key, value in options.items():
            if key in NAMING and isinstance(value, str):
                place = source(value) if ":" in value or not value.endswith(".py") else Path(value).expanduser()
                if place is not None and place.is_file():
                    yield place
            else:
                yield from named(value)
    elif isinstance(options, Sequence) and not isinstance(options, (str, bytes)):
        for value in options:
            yield from named(value)


def source(target: str) -> Path | None:
    """The file that `lookup.find` would import, found without an import; None where it is no plain file."""
    place = target.rpartition(":" if ":" in target else ".")[0]
    if place.endswith(".py"):
        return Path(place).expanduser()
    modules = [Path(folder, *place.split(".")) for folder in sys.path]
    files = (file for module in modules for file in (module / "__init__.py", Path(f"{module}.py")))
    return next((file for file in files if file.is_file()), None)
