"""Worker processes: forked by a launcher that has imported torch and not touched CUDA, ended as a group.

    parent ──socket──▶ launcher (`python -m optexp.arm`) ──fork──▶ worker, worker, ...
       └───────────────── one connection each ─────────────────────────┘

Python's own forkserver re-imports the caller's main module, which breaks notebooks and unguarded scripts; its
workers cannot get new environment variables either, which torch reads when it loads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import hmac
import importlib
import json
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from itertools import dropwhile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

from optexp.config import ConfigError
from optexp.strategy import Unsupported
from optexp.workers.anomaly import forward_frames, hides_forward
from optexp.workers.descent import adopt_orphans, descendants

_PACKAGE = f"{Path(__file__).resolve().parent.parent}{os.sep}"
_STRATEGIES = f"{Path(__file__).resolve().parent.parent.parent / 'strategies'}{os.sep}"
_LIBRARIES = tuple(  # they call the user's code as often as they are called by it
    spec.origin.removesuffix("__init__.py")
    for name in ("torch", "cloudpickle", "functools")
    if (spec := find_spec(name)) and spec.origin
)
TICKET, FORGED = 16, "Forged"  # bytes that a question brings and its answer takes back; an answer without them
_CALLS = os.path.join("torch", "nn", "modules", "module.py")  # two frames for every module that is called


@dataclass
class Failure(Exception):
    """A worker crashed, hung, ran out of memory, or its code raised: what is known about it."""

    type: str
    message: str
    traceback: str = ""
    worker: str = ""

    def __str__(self) -> str:
        named = self.worker and self.type != "ConfigError"  # which is the user's mistake in any arm
        return f"{self.worker}: {self.message}" if named else self.message


# --- parent's side ---------------------------------------------------------------------------------------------


class Worker:
    """A process that answers messages: `call` waits for the answer, `start` and `wait` let several work at once."""

    def __init__(
        self, launcher: Launcher, pid: int, connection: Connection, name: str, log: Path, timeout_s: float
    ) -> None:
        self.launcher, self.pid, self.connection = launcher, pid, connection
        self.name, self.log, self.timeout_s = name, log, timeout_s
        self.alive, self._ticket = True, b""

    def call(self, method: str, **arguments: Any) -> Any:
        self.start(method, **arguments)
        return self.wait()

    def start(self, method: str, **arguments: Any) -> None:
        # Where the process is gone, `wait` finds the end of the connection and says how it ended.
        self._ticket = secrets.token_bytes(TICKET)
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(self._ticket + pickle.dumps((method, arguments)))

    def wait(self) -> Any:
        """The answer to the last `start`; raises `Unsupported` or `Failure`."""
        try:
            if not self.connection.poll(self.timeout_s):
                self.close()
                raise Failure(
                    "Timeout", f"no answer within {self.timeout_s:g} s (timeout_s): ended", self._log_tail(), self.name
                )
            answer = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            ending = self.launcher.ending(self.pid)
            tail = self._log_tail()
            self.close()
            raise Failure("Crash", f"the process ended: {ending}", tail, self.name) from None
        except OSError:  # a length that no message has
            answer = b""
        # Before it is decoded: what else writes there does not know the question's ticket.
        if not hmac.compare_digest(answer[:TICKET], self._ticket):
            self.close()
            text = "an answer arrived to no question: code in this process wrote to the connection of its answers"
            raise Failure(FORGED, text, self._log_tail(), self.name)
        kind, value = pickle.loads(answer[TICKET:])
        if kind == "unsupported":
            raise Unsupported(value)
        if kind == "failure":
            raise Failure(**value, worker=self.name)
        return value

    def close(self) -> None:
        """End the process and everything it started."""
        if self.alive:
            self.alive = False
            self.connection.close()
            _kill_group(self.pid)

    def _log_tail(self, lines: int = 40) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return "\n".join(text.splitlines()[-lines:])


class InProcess:
    """The same calls on an object in this process (`isolation=none`): for a debugger and for small CPU tests."""

    def __init__(self, target: object, name: str) -> None:
        self.target, self.name = target, name
        self._answer: Any = None
        self._argv = sys.argv[:1]

    def call(self, method: str, **arguments: Any) -> Any:
        self.start(method, **arguments)
        return self.wait()

    def start(self, method: str, **arguments: Any) -> None:
        ours, sys.argv = sys.argv, self._argv
        try:
            self._answer = _answer(self.target, method, arguments)
        finally:
            self._argv, sys.argv = sys.argv, ours

    def wait(self) -> Any:
        kind, value = self._answer
        if kind == "unsupported":
            raise Unsupported(value)
        if kind == "failure":
            raise Failure(**value, worker=self.name)
        return value

    def close(self) -> None:
        self.target = None


class Launcher:
    """Forks workers on request; all of them end with it, and it ends with this process."""

    def __init__(self, environment: Mapping[str, str] | None = None) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # whole messages
        variables = {
            **os.environ,
            # cudaGetDeviceCount would make later forks unusable; NVML answers the same question.
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's, by which the card is read; CUDA's own is by speed
            "TORCH_WARM_POOL": "0",
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path),
            **(environment or {}),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "optexp.arm", str(theirs.fileno())],
            env=variables,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends its workers in order
        )
        theirs.close()
        self._workers: list[Worker] = []
        self._asked = False

    def preload(self, modules: Sequence[str]) -> None:
        """Import slow modules once, before workers are forked; does not wait for it."""
        with suppress(OSError):  # the next request finds out that the launcher is gone
            self.socket.sendall(json.dumps({"do": "preload", "modules": list(modules)}).encode())

    def fork(
        self, role: str, name: str, log: Path, timeout_s: float, variables: Mapping[str, str] | None = None
    ) -> Worker:
        """A new worker that serves an instance of `role` ("package.module:Class").

        Args:
            variables: Of its environment, which are set before anything of the role is imported.
        """
        ours, theirs = socket.socketpair()
        request: dict[str, Any] = {"do": "fork", "role": role, "log": str(log), "path": sys.path, "cwd": os.getcwd()}
        request |= {"argv": sys.argv[:1], "variables": dict(variables or {})}
        answer = self._ask(request, theirs.fileno(), max(timeout_s, 120))  # it may still be importing torch
        theirs.close()
        worker = Worker(self, answer["pid"], Connection(ours.detach()), name, log, timeout_s)
        self._workers.append(worker)
        return worker

    def ending(self, pid: int) -> str:
        """How a worker ended, in words."""
        status = self._ask({"do": "wait", "pid": pid})["status"]
        if status is None:
            return "its connection closed"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit code {status}"

    def _ask(self, request: dict[str, Any], descriptor: int | None = None, timeout_s: float = 60) -> dict[str, Any]:
        self._asked, message = True, json.dumps(request).encode()
        try:
            self.socket.settimeout(timeout_s)
            socket.send_fds(self.socket, [message], [] if descriptor is None else [descriptor])
            answer: dict[str, Any] = json.loads(_receive(self.socket)[0])
        except TimeoutError:
            self.process.kill()
            text = f"no worker could be started within {timeout_s:g} s: does an import hang?"
            raise Failure("Timeout", text) from None
        except (OSError, EOFError):
            raise Failure("Crash", f"the launcher ended (exit code {self.process.poll()})") from None
        return answer

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def end_workers(self) -> None:
        """Returns when they are gone: who holds gigabytes on a GPU takes a while, which the next comparison needs."""
        for worker in self._workers:
            worker.close()
        if self.alive:
            for worker in self._workers:
                with suppress(Failure):
                    self.ending(worker.pid)
        self._workers.clear()

    def close(self) -> None:
        self.end_workers()
        self.socket.close()
        if not self._asked:  # it has nothing to end, and may be importing for seconds
            self.process.kill()
        try:
            self.process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


# --- launcher's side -------------------------------------------------------------------------------------------


def serve_launcher(descriptor: int) -> None:
    """Answer the parent's requests until it goes away, then end every worker."""
    _die_with_parent()
    control = socket.socket(fileno=descriptor)
    children: set[int] = set()
    while True:
        try:
            message, descriptors = _receive(control)
        except EOFError:
            break
        request = json.loads(message)
        answer: dict[str, Any] = {}
        if request["do"] == "preload":
            for module in request["modules"]:
                with suppress(Exception, SystemExit):  # an arm that needs it meets the same error, and tells it
                    importlib.import_module(module)
            continue  # nobody waits for it
        if request["do"] == "fork":
            pid = os.fork()
            if pid == 0:
                control.close()
                _become_worker(request, descriptors[0])
            children.add(pid)
            answer = {"pid": pid}
        elif request["do"] == "wait":
            answer = {"status": _wait(request["pid"], seconds=5.0)}
        for inherited in descriptors:
            os.close(inherited)
        control.sendall(json.dumps(answer).encode())
        children = {pid for pid in children if not _reap(pid)}
    for pid in children:
        _kill_group(pid)


_endings: dict[int, int] = {}


def _reap(pid: int) -> bool:
    """Whether a child has ended; its status is kept for whoever asks."""
    if pid not in _endings:
        done, status = os.waitpid(pid, os.WNOHANG)
        if not done:
            return False
        _endings[pid] = os.waitstatus_to_exitcode(status)
    return True


def _wait(pid: int, seconds: float) -> int | None:
    deadline = time.monotonic() + seconds
    while not _reap(pid):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.01)
    return _endings[pid]


# --- worker's side ---------------------------------------------------------------------------------------------


def _become_worker(request: dict[str, Any], descriptor: int) -> NoReturn:
    os.setsid()
    _die_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    os.chdir(request["cwd"])
    os.environ.update(request["variables"])
    sys.path[:], sys.argv = request["path"], request["argv"]  # the arguments are no user's script's
    module, _, name = request["role"].partition(":")
    status = 1
    try:
        serve(getattr(importlib.import_module(module), name)(), Connection(descriptor))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the launcher's own clean-up must not run a second time


def serve(target: object, connection: Connection) -> None:
    """Answer messages until the other side goes away."""
    while True:
        try:
            question = connection.recv_bytes()
        except EOFError:
            return
        method, arguments = pickle.loads(question[TICKET:])
        connection.send_bytes(question[:TICKET] + pickle.dumps(_answer(target, method, arguments)))


def _answer(target: object, method: str, arguments: dict[str, Any]) -> tuple[str, Any]:
    function: Callable[..., Any] = getattr(target, method)
    try:
        return "ok", function(**arguments)
    except Unsupported as reason:
        return "unsupported", str(reason)
    except KeyboardInterrupt:
        raise
    except SystemExit as exit:
        return "failure", describe(exit) | {"message": f"code under test called sys.exit({exit.code!r})"}
    except ConfigError as mistake:  # found out where the user's code is loaded; a sentence says it all
        return "failure", {"type": "ConfigError", "message": str(mistake), "traceback": ""}
    except Exception as error:
        return "failure", describe(error) | _forward_of(error, partial(function, **arguments))


def _forward_of(error: Exception, again: Callable[[], object]) -> dict[str, str]:
    """The traceback of the forward call instead, where an operator of its backward pass failed."""
    if not hides_forward(error):
        return {}
    inside = dropwhile(lambda frame: frame[0] != __file__, forward_frames(again))  # not those that called us
    frames = [(file, text) for file, text in inside if not _ours(file) and not file.endswith(_CALLS)]
    theirs = [text for file, text in frames if not file.startswith(_LIBRARIES)] or [text for _, text in frames]
    if not theirs:
        return {}
    ending = "".join(traceback.format_exception_only(error))
    text = "\n".join(["Traceback of the forward call whose backward failed:", *theirs, ending])
    return {"traceback": text}


def _ours(file: str) -> bool:
    return file.startswith((_PACKAGE, _STRATEGIES, "<frozen", "<string>"))


def describe(error: BaseException) -> dict[str, str]:
    """An exception as data, with the part of its traceback that is the user's: from their first frame on, or else from
    that of the library they gave a model of, and without the engine's."""
    told = traceback.TracebackException.from_exception(error)
    ending = list(told.format_exception_only())
    whole = "".join(told.format())
    _keep_theirs(told)
    message = ending[-1] if isinstance(error, SyntaxError) else ending[0]  # a syntax error says first where it is
    return {
        "type": type(error).__name__,
        "message": str(error) if type(error).__module__.startswith("optexp.") else message.strip().splitlines()[0],
        # Where our own code raised it, the whole traceback is more use.
        "traceback": "".join(told.format()) if told.stack or isinstance(error, SyntaxError) else whole,
    }


def _keep_theirs(told: traceback.TracebackException | None) -> None:
    """In place; also in the exceptions that led to this one."""
    if told is None:
        return
    ours = (_PACKAGE, _STRATEGIES, "<frozen importlib")
    last = max((i for i, frame in enumerate(told.stack) if frame.filename.startswith(ours)), default=-1)
    theirs = (i for i, frame in enumerate(told.stack) if not frame.filename.startswith((*ours, *_LIBRARIES)))
    kept = told.stack[next(theirs, last + 1) :]
    frames = [f for f in kept if not f.filename.startswith(ours) and not f.filename.endswith(_CALLS)]
    told.stack = traceback.StackSummary.from_list(frames)
    _keep_theirs(told.__cause__)
    _keep_theirs(told.__context__)


# --- small things ----------------------------------------------------------------------------------------------


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One whole message, and the descriptor that came with it."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 1)
    if not message:
        raise EOFError
    return message, descriptors


def _kill_group(pid: int) -> None:
    below = descendants(pid)  # some may have a group of their own
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    for each in below:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(each, signal.SIGKILL)


def _die_with_parent() -> None:
    """Linux: be killed when the parent is, however it ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
