"""One run of a command: its whole time, or the time of its steps by the lines that it prints."""

from __future__ import annotations

import os
import re
import selectors
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO

from optexp.errors import ConfigError, Failure
from optexp.measurement.clock import Timing, account, now, share_taken
from optexp.support.descent import descendants
from optexp.workers.serving import kill_group

LOOK_S = 0.1  # between two readings of the time for which its threads had no core
TAIL = 2000  # characters of stderr in a message


@dataclass(frozen=True)
class Steps:
    """Lines of a command's output that end a step.

    pattern: found in such a line
    skip:    matching lines at the beginning that do not count
    """

    pattern: re.Pattern[str]
    skip: int = 3

    def timing(self, ends_s: Sequence[float], name: str, queued: float | None) -> Timing:
        """The mean step between the first line that counts and the last.

        Raises:
            ConfigError: Too few lines match.
        """
        counted = ends_s[self.skip :]
        if len(counted) < 2:
            raise ConfigError(
                f"{name} printed {len(ends_s)} lines that match {self.pattern.pattern!r}: --step needs at least"
                f" {self.skip + 2} (--skip={self.skip} are left out); its output must not be kept in a buffer"
            )
        steps = len(counted) - 1
        return Timing(steps, (counted[-1] - counted[0]) / steps, None, counted[0], queued=queued)


@dataclass(frozen=True)
class Program:
    """A command.

    name:  name in messages
    words: the command, split as a shell would; no shell runs it
    steps: None: the command is timed as a whole
    """

    name: str
    words: tuple[str, ...]
    steps: Steps | None
    timeout_s: float

    @classmethod
    def of(cls, name: str, command: str, steps: Steps | None, timeout_s: float) -> Program:
        """Split a command.

        Raises:
            ConfigError: It is empty, or a quote stays open.
        """
        try:
            words = tuple(shlex.split(command))
        except ValueError as mistake:
            raise ConfigError(f"command {name}, {command}: {mistake}") from None
        if not words:
            raise ConfigError(f"command {name} is empty")
        return cls(name, words, steps, timeout_s)

    def run(self) -> Timing:
        """Run the command once. Its output is read line by line and not stored.

        Raises:
            ConfigError: It does not exist, or prints too few steps.
            Failure: It fails, or takes longer than `timeout_s`.
        """
        begin = now()
        with tempfile.TemporaryFile() as stderr, self._started(stderr) as process:
            queue = Queue(process.pid)
            ends_s = [at for at, line in self._lines(process, queue) if self._ends_step(line)]
            try:
                status, end = process.wait(self.timeout_s), now()
            except subprocess.TimeoutExpired:
                raise self._late() from None
            if status:
                tail = _tail(stderr)
                message = f"exit status {status}: {tail or 'it printed nothing'}"
                raise Failure("Crash", message, tail, f"command {self.name}")
        if self.steps is None:
            return Timing(1, end - begin, None, begin, queued=queue.share())
        return self.steps.timing(ends_s, f"command {self.name}", queue.share())

    def _ends_step(self, line: str) -> bool:
        return self.steps is not None and self.steps.pattern.search(line) is not None

    @contextmanager
    def _started(self, stderr: IO[bytes]) -> Iterator[subprocess.Popen[bytes]]:
        variables = {**os.environ, "PYTHONUNBUFFERED": "1"}  # else a pipe delivers lines late, many at once
        nothing = subprocess.DEVNULL
        try:
            process = subprocess.Popen(
                self.words, stdin=nothing, stdout=subprocess.PIPE, stderr=stderr, env=variables, start_new_session=True
            )
        except OSError as error:
            raise ConfigError(f"command {self.name}: {self.words[0]}: {error.strerror}") from None
        try:
            yield process
        finally:
            kill_group(process.pid)
            process.communicate()

    def _lines(self, process: subprocess.Popen[bytes], queue: Queue) -> Iterator[tuple[float, str]]:
        """Lines of its output, each with the moment at which it was read."""
        assert process.stdout is not None
        descriptor, rest, limit = process.stdout.fileno(), b"", now() + self.timeout_s
        with selectors.DefaultSelector() as selector:
            selector.register(descriptor, selectors.EVENT_READ)
            while now() < limit:
                ready = selector.select(LOOK_S)
                at = now()
                queue.look()
                if not ready:
                    continue
                if not (chunk := os.read(descriptor, 1 << 16)):
                    return
                *whole, rest = (rest + chunk).split(b"\n")
                for line in whole:
                    yield at, line.decode(errors="replace")
        raise self._late()

    def _late(self) -> Failure:
        return Failure("Timeout", f"no end within {self.timeout_s:g} s (timeout_s)", worker=f"command {self.name}")


class Queue:
    """The time for which a process and its descendants were ready to run but had no core."""

    def __init__(self, pid: int) -> None:
        self.pid, self.seen = pid, [(now(), (0.0, 0.0))]

    def look(self) -> None:
        """Read the system's accounts, if the last reading is LOOK_S old."""
        if now() - self.seen[-1][0] < LOOK_S:
            return
        known = [found for pid in (self.pid, *descendants(self.pid)) if (found := account(pid))]
        if known:
            self.seen.append((now(), (sum(ran for ran, _ in known), sum(queued for _, queued in known))))

    def share(self) -> float | None:
        """The share of the run without a core, by the largest account, as accounts of ended threads vanish.

        None for a run that was too short for a second reading.
        """
        if len(self.seen) < 2:
            return None
        begin, _ = self.seen[0]
        end, most = max(self.seen, key=lambda look: sum(look[1]))
        return share_taken((0.0, 0.0), most, end - begin, len(os.sched_getaffinity(0)))


def _tail(stderr: IO[bytes]) -> str:
    stderr.seek(0)
    return stderr.read().decode(errors="replace").strip()[-TAIL:]
