"""The parent's side of a worker: typed calls of the methods of an object that lives in another process.

arm.call(Arm.observe, Look(3))             # checked and typed by the signature of Arm.observe
pending = arm.start(Arm.block, steps=20)   # several arms work at once
timing = pending.wait()
"""

from __future__ import annotations

import hmac
import pickle
import secrets
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, TypeVar, cast

import msgspec

from optexp.errors import FORGED, SPENT, UNTIMED, Failure, Unsupported
from optexp.support.pausing import is_paused
from optexp.workers import wire
from optexp.workers.serving import TICKET, Kind, Raised, answer, kill_group

LOOK_S = 1.0  # between looks for an answer
STOPPED_LOOKS = 5  # in a row that find a worker stopped: who pauses a job pauses this process, too

P = ParamSpec("P")
R = TypeVar("R")
A_co = TypeVar("A_co", covariant=True)


@dataclass(frozen=True)
class Pending(Generic[R]):
    """An answer that is on its way."""

    receive: Callable[[], R]

    def wait(self) -> R:
        """The answer.

        Raises:
            Unsupported: a strategy cannot apply in that process.
            Failure: the process crashed, hung, ran out of memory, or its code raised.
        """
        return self.receive()


class Client(ABC, Generic[A_co]):
    """Calls the methods of an object of class `A_co`, one at a time.

    name:  the worker's name in a `Failure`
    pid:   of the worker's process; 0 for an object in this process
    """

    name: str
    pid: int = 0

    def call(self, method: Callable[Concatenate[A_co, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Ask and wait for the answer; see `Pending.wait` for what it raises."""
        return self.start(method, *args, **kwargs).wait()

    @abstractmethod
    def start(self, method: Callable[Concatenate[A_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        """Send a request; its answer is dropped if the next request is waited for instead."""

    @abstractmethod
    def close(self) -> None:
        """End the process and everything it started."""


class Endings(Protocol):
    """The launcher: as the parent of all workers it knows how each of them ended."""

    def ending(self, pid: int) -> str: ...


class Worker(Client[A_co]):
    """An object in a process of its own.

    timeout_s:  seconds after which a process without an answer is ended
    until_s:    time of `time.monotonic` after which no answer is awaited; then every call raises
    asked:      tickets of questions whose answers were not read; an error elsewhere leaves answers unread
    """

    def __init__(
        self, launcher: Endings, pid: int, connection: Connection, name: str, log: Path, timeout_s: float
    ) -> None:
        self.launcher, self.pid, self.connection = launcher, pid, connection
        self.name, self.log, self.timeout_s = name, log, timeout_s
        self.until_s = float("inf")
        self.asked: list[bytes] = []
        self.alive = True

    def start(self, method: Callable[Concatenate[A_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        self._refuse_late()
        # A process that has ended raises here; `_receive` meets the closed connection and reports how it ended.
        ticket = secrets.token_bytes(TICKET)
        self.asked.append(ticket)
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(ticket + pickle.dumps((method.__name__, args, kwargs)))
        return Pending(partial(self._receive, method, ticket))

    def _receive(self, method: Callable[..., R], ticket: bytes) -> R:
        message = self._message()
        while self.asked and self.asked[0] != ticket and _is_for(message, self.asked[0]):
            self.asked.pop(0)
            message = self._message()
        # Checked before decoding: other code that writes to this connection does not know the request's ticket.
        if not _is_for(message, ticket):
            self._refuse("an answer without a question: code in this process wrote to the connection of its answers")
        self.asked.remove(ticket)
        try:
            return _opened(method, message[TICKET:], self.name)
        except (msgspec.DecodeError, ValueError) as error:
            self._refuse(f"an answer is not of the type that was asked for ({error})")

    def _message(self) -> bytes:
        """The next message; empty where the connection ended inside it, as after a forged length."""
        try:
            if not self._answered():
                self._refuse_late()
                self.close()
                raise Failure(
                    "Timeout", f"no answer within {self.timeout_s:g} s (timeout_s): ended", self._log_tail(), self.name
                )
            return self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            ending = self.launcher.ending(self.pid)
            tail = self._log_tail()
            self.close()
            raise Failure("Crash", f"the process ended: {ending}", tail, self.name) from None
        except OSError:
            return b""

    def _answered(self) -> bool:
        """Whether an answer comes in time. Others may pause this process and the worker: of the time between two looks
        no more counts than was asked for.

        Raises:
            Failure: another process stopped the worker alone.
        """
        left_s, stopped = self.timeout_s, 0
        while not self.connection.poll(max(min(LOOK_S, left_s, self.until_s - time.monotonic()), 0.0)):
            left_s -= LOOK_S
            if left_s <= 0 or time.monotonic() >= self.until_s:
                return False
            stopped = stopped + 1 if is_paused(self.pid) else 0
            if stopped == STOPPED_LOOKS:
                self.close()
                raise Failure(UNTIMED, "another process stopped it (SIGSTOP): ended", worker=self.name)
        return True

    def _refuse_late(self) -> None:
        if time.monotonic() >= self.until_s:
            self.close()
            raise Failure(SPENT, "the time that was left for it is over: ended", worker=self.name)

    def _refuse(self, text: str) -> NoReturn:
        self.close()
        raise Failure(FORGED, text, self._log_tail(), self.name)

    def close(self) -> None:
        if self.alive:
            self.alive = False
            kill_group(self.pid)  # before it could end by itself, and leave processes behind without a parent
            self.connection.close()

    def _log_tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class InProcess(Client[A_co]):
    """A client of an object in this process (`isolation=none`): for a debugger and for small CPU tests."""

    def __init__(self, target: A_co, name: str) -> None:
        self.target: Any = target
        self.name = name
        self._argv = sys.argv[:1]

    def start(self, method: Callable[Concatenate[A_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        ours, sys.argv = sys.argv, self._argv
        try:
            message = answer(self.target, method.__name__, args, kwargs)
        finally:
            self._argv, sys.argv = sys.argv, ours
        return Pending(partial(_opened, method, message, self.name))

    def close(self) -> None:
        self.target = None


def _is_for(message: bytes, ticket: bytes) -> bool:
    """Whether a message answers the question with this ticket."""
    return hmac.compare_digest(message[:TICKET], ticket)


def _opened(method: Callable[..., R], message: bytes, worker: str) -> R:
    """The answer in a message.

    Raises:
        Unsupported, Failure: the message says so.
    """
    kind, content = Kind(message[0]), message[1:]
    if kind is Kind.UNSUPPORTED:
        raise Unsupported(wire.decode(content, str))
    if kind is Kind.FAILURE:
        raised = wire.decode(content, Raised)
        raise Failure(raised.type, raised.message, raised.traceback, worker)
    return cast(R, wire.decode(content, wire.returned_by(method)))
