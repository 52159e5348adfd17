"""The worker's side: answers messages until the parent goes away, and describes what code under test raised."""

from __future__ import annotations

import os
import pickle
import re
import signal
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import partial
from importlib.util import find_spec
from itertools import dropwhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from optexp import errors
from optexp.errors import ConfigError, Unsupported, UserFailure
from optexp.support.pausing import end
from optexp.support.shortage import OUT_OF_MEMORY, is_shortage
from optexp.support.units import byte_size
from optexp.workers import wire
from optexp.workers.anomaly import forward_frames, hides_forward

_PACKAGE = f"{Path(__file__).resolve().parent.parent}{os.sep}"
_STRATEGIES = f"{Path(__file__).resolve().parent.parent.parent / 'strategies'}{os.sep}"
_LIBRARIES = tuple(  # they call the user's code as often as they are called by it
    spec.origin.removesuffix("__init__.py")
    for name in ("torch", "cloudpickle", "functools")
    if (spec := find_spec(name)) and spec.origin
)
TICKET = 16  # bytes of a random ticket that each question brings and its answer returns
_CALLS = os.path.join("torch", "nn", "modules", "module.py")  # two frames for every module that is called


class Kind(IntEnum):
    """First byte of an answer."""

    VALUE = 0
    UNSUPPORTED = 1
    FAILURE = 2


@dataclass(frozen=True)
class Raised:
    """An exception as data; the traceback is the user's part of it."""

    type: str
    message: str
    traceback: str


def serve(target: object, connection: Connection) -> None:
    """Answer messages until the other side goes away."""
    while True:
        try:
            question = connection.recv_bytes()
        except EOFError:
            return
        method, args, kwargs = pickle.loads(question[TICKET:])
        connection.send_bytes(question[:TICKET] + answer(target, method, args, kwargs))


def answer(target: object, method: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """Call a method; its answer, or what it raised, as a message: a byte of `Kind` and the value by `wire.encode`."""
    function: Callable[..., Any] = getattr(target, method)
    try:
        kind, value = Kind.VALUE, wire.encode(function(*args, **kwargs))
    except Unsupported as reason:
        kind, value = Kind.UNSUPPORTED, wire.encode(str(reason))
    except KeyboardInterrupt:
        raise
    except SystemExit as exit:
        raised = replace(describe(exit), message=f"code under test called sys.exit({exit.code!r})")
        kind, value = Kind.FAILURE, wire.encode(raised)
    except ConfigError as mistake:  # found out where the user's code is loaded; a sentence says it all
        kind, value = Kind.FAILURE, wire.encode(Raised("ConfigError", str(mistake), ""))
    except Exception as error:
        raised = describe(error)
        forward = _forward_of(error, partial(function, *args, **kwargs))
        kind, value = Kind.FAILURE, wire.encode(replace(raised, traceback=forward or raised.traceback))
    return bytes([kind]) + value


def _forward_of(error: Exception, again: Callable[[], object]) -> str:
    """The traceback of the forward call, where an operator of its backward pass failed; else empty."""
    if not hides_forward(error):
        return ""
    inside = dropwhile(lambda frame: frame[0] != __file__, forward_frames(again))  # not those that called us
    frames = [(file, text) for file, text in inside if not _ours(file) and not file.endswith(_CALLS)]
    theirs = [text for file, text in frames if not file.startswith(_LIBRARIES)] or [text for _, text in frames]
    if not theirs:
        return ""
    ending = "".join(traceback.format_exception_only(error))
    return "\n".join(["Traceback of the forward call whose backward failed:", *theirs, ending])


ON_CARD = re.compile(r"Tried to allocate ([\d.]+ \w+)\..* capacity of ([\d.]+ \w+) of which ([\d.]+ \w+) is free")


def _ours(file: str) -> bool:
    return file.startswith((_PACKAGE, _STRATEGIES, "<frozen", "<string>"))


def describe(error: BaseException) -> Raised:
    """An exception as data, with the part of its traceback that is the user's: from their first frame on, or else from
    that of the library they gave a model of, and without the engine's."""
    if isinstance(error, UserFailure) and error.__cause__ is not None:
        return replace(describe(error.__cause__), message=str(error))
    told = traceback.TracebackException.from_exception(error)
    ending = list(told.format_exception_only())
    whole = "".join(told.format())
    _keep_theirs(told)
    message = ending[-1] if isinstance(error, SyntaxError) else ending[0]  # a syntax error says first where it is
    theirs = "".join(told.format()) if told.stack or isinstance(error, SyntaxError) else ""
    first_line = message.strip().splitlines()[0]
    if _no_memory(error):
        asked = re.search(r"tried to allocate (\d+) bytes", first_line)
        said = first_line if "out of memory" in first_line else f"out of memory ({first_line})"
        said = f"out of memory: {byte_size(float(asked[1]))} in one piece" if asked else said
        if left := ON_CARD.search(said):  # torch goes on with all processes of the card
            said = f"CUDA out of memory: {left[1]} in one piece, {left[3]} of {left[2]} free"
        return Raised(OUT_OF_MEMORY if is_shortage(error) else type(error).__name__, said, theirs)
    return Raised(
        _kind(error),
        str(error) if type(error).__module__.startswith("optexp.") else first_line,
        theirs or whole,  # where our own code raised it, the whole traceback is more use
    )


def _kind(error: BaseException) -> str:
    """The name of the error's class; with its module, where a class of ours has that name and means something else."""
    kind = type(error)
    foreign = hasattr(errors, kind.__name__) and not kind.__module__.startswith("optexp.")
    return f"{kind.__module__}.{kind.__name__}" if foreign else kind.__name__


def _no_memory(error: BaseException) -> bool:
    """Whether memory ran out: then our own frames say nothing, as in a batch that is drawn for the user."""
    return is_shortage(error) or isinstance(error, MemoryError) or "can't allocate memory" in str(error)


def _keep_theirs(told: traceback.TracebackException | None) -> None:
    """In place; also in the exceptions that led to this one."""
    if told is None:
        return
    ours = (_PACKAGE, _STRATEGIES, "<frozen")
    last = max((i for i, frame in enumerate(told.stack) if frame.filename.startswith(ours)), default=-1)
    theirs = (i for i, frame in enumerate(told.stack) if not frame.filename.startswith((*ours, *_LIBRARIES)))
    kept = told.stack[next(theirs, last + 1) :]
    frames = [f for f in kept if not f.filename.startswith(ours) and not f.filename.endswith(_CALLS)]
    told.stack = traceback.StackSummary.from_list(frames)
    _keep_theirs(told.__cause__)
    _keep_theirs(told.__context__)


def kill_group(pid: int) -> None:
    """End a process and everything it started."""
    end(pid)  # some of it may have a group of its own
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
