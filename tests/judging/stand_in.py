"""A worker for tests of those that run workers: what it does is the name of the problem."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace

import msgspec

from optexp.judging.job import READY, Request, Settings
from optexp.judging.line import Line, encoded
from optexp.records.verdict import Verdict


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
