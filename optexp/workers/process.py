"""Worker processes: forked by a launcher that has imported torch and not touched CUDA, ended as a group.

    parent ──socket──▶ launcher (`python -m optexp.workers`) ──fork──▶ worker, worker, ...
       └───────────────── one connection each ─────────────────────────┘

Python's own forkserver re-imports the caller's main module, which breaks notebooks and unguarded scripts; its
workers cannot get new environment variables either, which torch reads when it loads.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn, TypeVar, assert_never

from optexp.errors import Failure
from optexp.support import bytecode, pausing
from optexp.support.descent import adopt_orphans
from optexp.support.nvml_count import SETTING
from optexp.user_code import texts
from optexp.workers import inductor_facts, requests, wire
from optexp.workers.client import Worker
from optexp.workers.home import Home
from optexp.workers.requests import Ended, Fork, Forked, Preload, Wait
from optexp.workers.serving import kill_group, serve

T = TypeVar("T")
INDUCTOR = "torch._inductor.compile_fx"


class Launcher:
    """Forks workers on request; all of them end with it, and it ends with this process.

    environment: variables beside this process's own
    home:        of all its workers; None: this process's interpreter, import path and working folder
    """

    def __init__(self, environment: Mapping[str, str] | None = None, home: Home | None = None) -> None:
        self.home = home
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)  # whole messages
        variables = {
            **bytecode.environment(os.environ),
            # cudaGetDeviceCount would make later forks unusable; NVML answers the same question.
            **SETTING,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # NVML's, by which the card is read; CUDA's own is by speed
            "TORCH_WARM_POOL": "0",
            "PYTHONPATH": os.pathsep.join(home.path if home else [p or os.getcwd() for p in sys.path]),
            **(environment or {}),
        }
        python = [home.interpreter, "-P"] if home else [sys.executable]  # -P: a folder in `home` may hold an optexp
        self.process = subprocess.Popen(
            [*python, "-m", "optexp.workers", str(theirs.fileno())],
            env=variables,
            cwd=home.folder if home else None,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C reaches the parent alone, which then ends its workers in order
        )
        theirs.close()
        self._workers: list[Worker[Any]] = []
        self._asked = False

    def preload(self, modules: Sequence[str], device_type: str) -> None:
        """Import slow modules once, before workers are forked; does not wait for it.

        With Inductor among them, find out what it asks for when it compiles for this type of device.
        """
        with suppress(OSError):  # the next request finds out that the launcher is gone
            self.socket.sendall(wire.encode(Preload(list(modules), device_type)))

    def fork(
        self, role: type[T], name: str, log: Path, timeout_s: float, variables: Mapping[str, str] | None = None
    ) -> Worker[T]:
        """A new worker that serves an instance of `role`.

        Args:
            role: Class without arguments, which the worker imports by its module's name.
            name: What a failure calls the worker.
            log: File of what the worker prints.
            timeout_s: Seconds that an answer may take.
            variables: Of its environment, which are set before anything of the role is imported.
        """
        ours, theirs = socket.socketpair()
        request = Fork(
            role.__module__,
            role.__qualname__,
            log=os.fsencode(log),
            path=[] if self.home else [os.fsencode(entry) for entry in sys.path],
            folder=os.fsencode(self.home.folder) if self.home else os.getcwdb(),
            arguments=[os.fsencode(argument) for argument in sys.argv[:1]],
            variables={os.fsencode(name): os.fsencode(value) for name, value in (variables or {}).items()},
        )
        forked = self._ask(request, Forked, theirs.fileno(), max(timeout_s, 120))  # it may still be importing torch
        theirs.close()
        worker: Worker[T] = Worker(self, forked.pid, Connection(ours.detach()), name, log, timeout_s)
        self._workers.append(worker)
        return worker

    def ending(self, pid: int) -> str:
        """How a worker ended, in words."""
        status = self._ask(Wait(pid), Ended).status
        if status is None:
            return "its connection closed"
        if status < 0:
            return f"killed by {signal.Signals(-status).name}"
        return f"exit code {status}"

    def _ask(self, request: Fork | Wait, answer: type[T], descriptor: int | None = None, timeout_s: float = 60) -> T:
        self._asked, message = True, wire.encode(request)
        try:
            self.socket.settimeout(timeout_s)
            socket.send_fds(self.socket, [message], [] if descriptor is None else [descriptor])
            return wire.decode(_receive(self.socket)[0], answer)
        except TimeoutError:
            self.process.kill()
            text = f"no worker could be started within {timeout_s:g} s: does an import hang?"
            raise Failure("Timeout", text) from None
        except (OSError, EOFError):
            raise Failure("Crash", f"the launcher ended (exit code {self.process.poll()})") from None

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
    die_with_parent()
    control = socket.socket(fileno=descriptor)
    children: set[int] = set()
    while True:
        try:
            message, descriptors = _receive(control)
        except EOFError:
            break
        answer: Forked | Ended
        match request := requests.request(message):
            case Preload():
                for module in request.modules:
                    with suppress(Exception, SystemExit):  # an arm that needs it meets the same error, and tells it
                        importlib.import_module(module)
                if INDUCTOR in request.modules:
                    inductor_facts.learn(request.device_type)
                continue  # without an answer
            case Fork():
                pid = os.fork()
                if pid == 0:
                    control.close()
                    _become_worker(request, descriptors[0])
                children.add(pid)
                answer = Forked(pid)
            case Wait():
                answer = Ended(_wait(request.pid, seconds=5.0))
            case _:
                assert_never(request)
        for inherited in descriptors:
            os.close(inherited)
        control.sendall(wire.encode(answer))
        children = {pid for pid in children if not _reap(pid)}
    for pid in children:
        kill_group(pid)


_endings: dict[int, int] = {}


def _reap(pid: int) -> bool:
    """Whether a child has ended; its status is kept for later requests."""
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


def _become_worker(request: Fork, descriptor: int) -> NoReturn:
    os.setsid()
    die_with_parent()
    adopt_orphans()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    log = os.open(request.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    faulthandler.enable(sys.stderr)
    os.chdir(request.folder)
    os.environ.update((os.fsdecode(name), os.fsdecode(value)) for name, value in request.variables.items())
    sys.path[:] = [os.fsdecode(entry) for entry in request.path] or sys.path
    sys.argv = [os.fsdecode(argument) for argument in request.arguments]  # no user's script's
    texts.note_imports()
    pausing.count_pauses()
    status = 1
    try:
        from optexp.user_code.schedule_end import outlast_schedules  # torch, which the parent may not have imported

        outlast_schedules()
        serve(getattr(importlib.import_module(request.module), request.name)(), Connection(descriptor))
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # the launcher's own clean-up must not run a second time


def _receive(connection: socket.socket) -> tuple[bytes, list[int]]:
    """One whole message, and the descriptor that came with it."""
    message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 1)
    if not message:
        raise EOFError
    return message, descriptors


def die_with_parent() -> None:
    """Linux: be killed when the parent is, however it ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
