"""Dataclasses as the schema of configuration nodes: names, types and choices are checked when an object is built.

A node's `_target_` names a dataclass; its fields are the node's keys. There is no second list of names or types.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from optexp.errors import ConfigError

T = TypeVar("T")
LISTED = 40  # names in a message: more of them would bury it


def choice(default: Any, *others: Any) -> Any:
    """A dataclass field with a closed set of values; the first is the default."""
    return field(default=default, metadata={"choices": (default, *others)})


def build(node: Any, key: str) -> Any:
    """The object that a configuration node describes: `_target_` names a dataclass, the other keys are its fields.

    Args:
        node: A mapping, or a node of OmegaConf.
        key: Of the node, for messages.

    Raises:
        ConfigError: `_target_` is missing or names no dataclass, or a value is not allowed.
    """
    values = dict(plain(node) if OmegaConf.is_config(node) else node or {})
    target = values.pop("_target_", None)
    if not isinstance(target, str):
        raise ConfigError(
            f"{key} has no _target_: name the dataclass to build, as in _target_: my_package.module.MyClass"
        )
    return typed(_dataclass(target, key), values, key)


def unknown(node: Any, key: str) -> list[str]:
    """Keys of a node that its dataclass lacks; the arguments and errors are those of `build`."""
    values = dict(plain(node))
    target = values.pop("_target_", None)
    if not isinstance(target, str):
        return []
    known = {f.name for f in fields(_dataclass(target, key)) if f.init}
    return [name for name in values if name not in known]


def typed(cls: Callable[..., T], values: Mapping[str, Any], key: str = "") -> T:
    """`cls(**values)` with every name, type and choice checked against the dataclass `cls`.

    Args:
        key: Of the node, for messages.

    Raises:
        ConfigError: a name does not exist, a value is missing, or has another type or choice than its field.
    """
    schema = OmegaConf.structured(cls)
    known = {f.name: f for f in fields(cls) if f.init}  # type: ignore[arg-type]
    hints = get_type_hints(cls)
    checked: dict[str, Any] = {}
    for name, value in values.items():
        full = f"{key}.{name}" if key else name
        if name not in known:
            raise ConfigError(f"{full}={shown(value)}: there is no such key{suggest(name, known)}")
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            checked[name] = typed(hints[name], value, full)  # type: ignore[arg-type]
            continue
        choices = known[name].metadata.get("choices")
        try:
            schema[name] = value
        except OmegaConfBaseException:
            said = known[name].metadata.get("words") or _words(hints[name])
            expected = f"one of {_join(choices)}" if choices else said
            raise ConfigError(f"{full}={shown(value)} is not allowed: it must be {expected}") from None
        if choices and schema[name] not in choices:
            raise ConfigError(f"{full}={shown(value)} is not allowed{suggest(value, choices)}")
    for name in known.keys() - checked.keys():
        try:
            checked[name] = OmegaConf.to_object(schema[name]) if OmegaConf.is_config(schema[name]) else schema[name]
        except MissingMandatoryValue:
            raise ConfigError(f"{key}.{name} has no value: it must be {_words(hints[name])}") from None
    try:
        return cls(**checked)
    except ValueError as error:  # a dataclass may check more, in __post_init__
        named = str(error).partition("=")[0] in hints  # its message begins with the field
        raise ConfigError(f"{key}{'.' if named else ': '}{error}") from error


def plain(node: Any) -> Any:
    """A configuration as plain Python values, interpolations resolved.

    Raises:
        ConfigError: an interpolation has no value.
    """
    try:
        return OmegaConf.to_container(node, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from None


def _dataclass(target: str, key: str) -> Any:
    module, _, name = target.rpartition(".")
    if not module:
        raise ConfigError(f"{key}: _target_={target} names no module: write my_package.module.{target}")
    try:
        cls = getattr(importlib.import_module(module), name, None)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module}.".startswith(f"{error.name}."):
            raise  # the user's module exists, something that it imports does not: their traceback says more
        raise ConfigError(f"{key}: _target_={target} was not found: there is no module {error.name!r}") from None
    if cls is None:
        raise ConfigError(f"{key}: _target_={target} was not found: module {module!r} has no {name!r}")
    if not (isinstance(cls, type) and is_dataclass(cls)):
        raise ConfigError(f"{key}: _target_={target} is not a dataclass: decorate the class with @dataclass")
    if missing := sorted(getattr(cls, "__abstractmethods__", ())):
        parameters = {method: ", ".join(inspect.signature(getattr(cls, method)).parameters) for method in missing}
        signatures = " and ".join(f"{method}({names})" for method, names in parameters.items())
        raise ConfigError(f"{key}: {name} has no {' and no '.join(missing)}: define {signatures}")
    return cls


# --- words -----------------------------------------------------------------------------------------------------


def suggest(given: Any, allowed: Iterable[Any]) -> str:
    """The end of a message about an unknown name: the nearest allowed one, and all of them if few."""
    names = [shown(name) for name in allowed]
    near = difflib.get_close_matches(str(given), names, n=1)
    question = [f"did you mean {near[0]}?"] if near else []
    choices = f"allowed: {', '.join(names)}" if len(names) <= LISTED else f"there are {len(names)}"
    return f" ({' '.join([*question, choices])})"


def _join(values: Iterable[Any]) -> str:
    return ", ".join(shown(value) for value in values)


def shown(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


WORDS = {str: "text", int: "an integer", float: "a number", bool: "true or false", type(None): "null"}


def _words(hint: Any) -> str:
    """A type as people say it."""
    if get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(member) for member in get_args(hint))
    if get_origin(hint) in (list, tuple):
        return "a list" if get_args(hint)[0] is Any else f"a list of {_words(get_args(hint)[0])}"
    return WORDS.get(hint, getattr(hint, "__name__", str(hint)))
