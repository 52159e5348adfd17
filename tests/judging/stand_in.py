"""A worker for tests of those that run workers: what it does is the name of the problem."""

from __future__ import annotations

import os
import signal
import sys
import time

import msgspec

from optexp.judging.job import Job, Settings
from optexp.judging.line import Line, encoded
from optexp.records.verdict import Verdict


def main() -> None:
    settings = msgspec.json.decode(sys.stdin.readline(), type=Settings)
    print(flush=True)
    for text in sys.stdin:
        job = msgspec.json.decode(text, type=Job)
        if job.problem == "hangs":
            time.sleep(60)
        if job.problem == "crashes":
            print("the last words", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        card = os.environ.get("CUDA_VISIBLE_DEVICES", "none")
        line = Line(job.key, job.suite, job.problem, job.candidate, Verdict.VERIFIED, f"{settings.preset} on {card}")
        sys.stdout.buffer.write(encoded(line) + b"\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
