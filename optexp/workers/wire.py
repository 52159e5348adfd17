"""Answers of worker processes as bytes: MessagePack, decoded into the type that the asked method declares.

A worker runs code that is not trusted. Decoding builds numbers, strings, containers and dataclasses and calls nothing
that the sender named; unpickling would.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any, TypeVar, get_type_hints

import msgspec

T = TypeVar("T")


class Foreign(TypeError):
    """An answer holds an object that no message can carry."""


def encode(value: object) -> bytes:
    """Bytes of an answer.

    Raises:
        Foreign: the value holds an object other than numbers, strings, containers of them, and dataclasses.
    """
    return msgspec.msgpack.encode(value, enc_hook=_plain)


def decode(content: bytes, kind: type[T]) -> T:
    """The value of type `kind` that `encode` made the bytes of.

    Raises:
        msgspec.ValidationError: the bytes hold another type.
    """
    return msgspec.msgpack.decode(content, type=kind)


@cache
def returned_by(method: Callable[..., Any]) -> Any:
    """The type of a method's answer, from its annotation."""
    return get_type_hints(method)["return"]


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Integral):  # numpy's
        return int(value)
    if isinstance(value, Real):
        return float(value)
    if isinstance(value, PurePath) or type(value).__module__ == "torch":  # a dtype, a layout, a device
        return str(value)
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise Foreign(f"{kind} cannot travel between processes: notes hold numbers, strings, and lists and dicts of them")
