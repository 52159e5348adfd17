"""Messages between the parent and its launcher. `optexp.workers.wire` carries them.

A request is one of a tagged union, which the launcher decodes; each kind of request has one type of answer, or none.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import msgspec


class Preload(msgspec.Struct, frozen=True, tag=True):
    """Import modules before workers for this type of device are forked; it has no answer."""

    modules: list[str]
    device_type: str


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Fork a worker; its answer is `Forked`. Paths and arguments are bytes, as they need not be UTF-8.

    module, name: class of the served object
    log:          file of the worker's output
    path:         entries of `sys.path`; none for the launcher's
    folder:       where the worker runs
    arguments:    its `sys.argv`
    variables:    of its environment, beside the launcher's
    """

    module: str
    name: str
    log: bytes
    path: list[bytes]
    folder: bytes
    arguments: list[bytes]
    variables: dict[bytes, bytes]


class Wait(msgspec.Struct, frozen=True, tag=True):
    """Wait a few seconds for the end of a worker; its answer is `Ended`."""

    pid: int


Request: TypeAlias = Preload | Fork | Wait


@dataclass(frozen=True)
class Forked:
    pid: int


@dataclass(frozen=True)
class Ended:
    """status: exit code, or the negative number of a signal; None for a worker that still runs"""

    status: int | None


_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)


def request(content: bytes) -> Request:
    """The request that `wire.encode` made the bytes of.

    Raises:
        msgspec.ValidationError: the bytes hold no request.
    """
    return _requests.decode(content)
