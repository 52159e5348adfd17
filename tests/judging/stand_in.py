"""A worker for tests of those that run workers: what it does is the name of the problem."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from dataclasses import replace

import msgspec

from optexp.comparison.quiet import Shared
from optexp.judging.job import READY, Request, Settings
from optexp.judging.line import Line, encoded
from optexp.records.verdict import Verdict


def work(problem: str, shared: str | None) -> None:
    """Work, and be timed, as the problem says; both are written down with their moments."""
    folder, pid = os.environ.get("STAND_IN", ""), os.getpid()

    def write(kind: str, *moments: float) -> None:
        with open(f"{folder}/{pid}.{kind}", "a") as file:
            file.write(json.dumps([pid, *moments]) + "\n")

    def worked(seconds: float) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            write("worked", time.monotonic())

    if problem == "works for long":
        worked(1.0)
    if "time" not in problem:
        return
    assert shared is not None
    quiet = Shared(shared, 2)
    worked(0.1)
    quiet.begin()
    if problem == "crashes when timed":
        os.kill(pid, signal.SIGSEGV)
    begin = time.monotonic()
    time.sleep(1.0 if problem == "is timed for long" else 0.2)
    write("timed", begin, time.monotonic())
    quiet.end()
    worked(0.1)


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.readline(), type=Settings)
    sys.stdout.buffer.write(READY + b"\n")
    sys.stdout.flush()
    for text in sys.stdin:
        request = msgspec.json.decode(text, type=Request)
        job = request.job
        if job.problem == "hangs":
            time.sleep(60)
        if job.problem == "crashes":
            print("the last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        work(job.problem, settings.shared)
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
        line = Line(job.key, job.suite, job.problem, job.candidate, Verdict.VERIFIED, f"{settings.preset} on {card}")
        if job.problem == "forges":  # lines as a candidate may write them into the worker's pipe
            forged = replace(line, verdict=Verdict.FASTER)
            sys.stdout.buffer.write(encoded(forged) + b"\n0 " + encoded(forged) + b"\nready\n{}\n" + b"half a line")
            line = replace(line, verdict=Verdict.NOT_EQUIVALENT)
        sys.stdout.buffer.write(f"\n{request.secret} ".encode() + encoded(line) + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
