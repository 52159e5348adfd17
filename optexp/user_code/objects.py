"""An object by `_target_` inside a model's arguments: what YAML cannot write, made anew for each model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from optexp.errors import ConfigError, NotCovered, first_line
from optexp.export.inlining import literal
from optexp.user_code.lookup import find

TARGET, ARGS, PARTIAL = "_target_", "_args_", "_partial_"  # as Hydra calls them
OTHERS = {"_convert_", "_recursive_"}  # Hydra's, that mean nothing here


@dataclass(frozen=True)
class Described:
    """An object described by a mapping with `_target_`.

    target:  package.module.Name or file.py:Name, imported when a model is made
    partial: a function with these arguments bound, which is not called
    """

    key: str
    target: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    partial: bool

    def make(self) -> Any:
        """The object.

        Raises:
            ConfigError: there is no such target, it takes other arguments, or it refuses their values
        """
        found = find(self.target, f"{self.key}.{TARGET}")
        args, kwargs = made(self.args), made(self.kwargs)
        if not callable(found):
            if args or kwargs:
                raise ConfigError(f"{self.key}.{TARGET}={self.target} is {type(found).__name__}, which takes nothing")
            return found
        if self.partial:
            self._check(found, args, kwargs)
            return partial(found, *args, **kwargs)
        try:
            return found(*args, **kwargs)
        except ConfigError:
            raise
        except Exception as error:
            if isinstance(error, TypeError):  # not before: a signature may say less than a class takes
                self._check(found, args, kwargs)
            kind = type(error).__name__
            raise ConfigError(
                f"{self.key}: {self.target} refuses its arguments ({kind}: {first_line(error)})"
            ) from None

    def _check(self, found: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        try:
            signature = inspect.signature(found)
        except (TypeError, ValueError):  # no Python function: it will say so itself
            return
        try:
            (signature.bind_partial if self.partial else signature.bind)(*args, **kwargs)
        except TypeError as error:
            raise ConfigError(f"{self.key}: {self.target} takes other arguments: {error}") from None

    def spelled(self) -> str:
        """Source of the object; `importlib` is imported.

        Raises:
            NotCovered: the target is in a file, which has no module name.
        """
        place, _, name = self.target.rpartition(":" if ":" in self.target else ".")
        if place.endswith(".py"):
            raise NotCovered(f"{self.key} is of a file, {self.target}")
        given = [*map(self._literal, self.args), *(f"{name}={self._literal(v)}" for name, v in self.kwargs.items())]
        called = f"importlib.import_module({place!r}).{name}"
        return f"partial({', '.join([called, *given])})" if self.partial else f"{called}({', '.join(given)})"

    def _literal(self, value: Any) -> str:
        return written(value, self.key)


def with_objects(value: Any, key: str) -> Any:
    """Values of a configuration, with `Described` for each mapping that has a `_target_`.

    Args:
        key: Of the values, for messages.

    Raises:
        ConfigError: a `_target_` is no text, or positional arguments are no list.
    """
    if isinstance(value, list):
        return [with_objects(entry, f"{key}[{index}]") for index, entry in enumerate(value)]
    if not isinstance(value, dict):
        return value
    inner = {name: with_objects(entry, f"{key}.{name}") for name, entry in value.items() if name not in OTHERS}
    if TARGET not in value:
        return {name: with_objects(entry, f"{key}.{name}") for name, entry in value.items()}
    target, args = inner.pop(TARGET), inner.pop(ARGS, [])
    if not isinstance(target, str):
        raise ConfigError(f"{key}.{TARGET}={target!r} names nothing: write package.module.Name")
    if not isinstance(args, list):
        raise ConfigError(f"{key}.{ARGS}={args!r} is no list of positional arguments")
    return Described(key, target, args, inner, bool(inner.pop(PARTIAL, False)))


def made(value: Any) -> Any:
    """The values, with an object for each `Described`.

    Raises:
        ConfigError: as for `Described.make`.
    """
    if isinstance(value, Described):
        return value.make()
    if type(value) is dict and any(map(_holds, value.values())):
        return {name: made(entry) for name, entry in value.items()}
    if type(value) in (list, tuple) and any(map(_holds, value)):
        return type(value)(made(entry) for entry in value)
    return value


def _holds(value: Any) -> bool:
    if type(value) is dict:
        return any(map(_holds, value.values()))
    return any(map(_holds, value)) if type(value) in (list, tuple) else isinstance(value, Described)


def written(value: Any, what: str) -> str:
    """A value as source, described objects included.

    Args:
        what: Subject of the message.

    Raises:
        NotCovered: the value has no source.
    """
    if isinstance(value, Described):
        return value.spelled()
    if not _holds(value):
        return literal(value, what)
    if isinstance(value, dict):
        return f"{{{', '.join(f'{name!r}: {written(entry, what)}' for name, entry in value.items())}}}"
    return f"[{', '.join(written(entry, what) for entry in value)}]"
