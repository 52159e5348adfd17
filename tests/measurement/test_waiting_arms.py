"""CPU time that an arm spends outside of its blocks, and time without a core."""

from __future__ import annotations

import os
import sys
import time
from random import Random
from statistics import fmean, median
from subprocess import PIPE, Popen
from typing import Any

import pytest

from optexp.comparison import sampling
from optexp.measurement import clock
from optexp.measurement.samples import Sample
from optexp.measurement.settings import MeasurementSettings
from tests.measurement.scripted import Scripted, measured, taken


def test_what_an_arm_does_while_it_waits_is_seen() -> None:
    """Two processes stand for the arms': one sleeps, one never rests."""
    endless = "import time\nwhile True: {}"
    commands = [[sys.executable, "-c", endless.format(line)] for line in ("time.sleep(1)", "pass")]
    with Popen(commands[0]) as asleep, Popen(commands[1]) as awake:

        class Slow(Scripted):
            def answer(self, method: str, **arguments: Any) -> Any:
                if method == "block":
                    time.sleep(0.02)
                return super().answer(method, **arguments)

        arms = {"baseline": Slow(1e-3), "candidate": Slow(1e-3)}
        for arm, process in zip(arms.values(), (asleep, awake), strict=True):
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
            arm.pid = process.pid  # type: ignore[attr-defined]
        time.sleep(0.1)  # until they have started
        found = measured(pairs=10, **arms)
        for process in (asleep, awake):
            process.kill()
    assert median(found.idle["baseline"]) < 0.05
    assert median(found.idle["candidate"]) > 0.1


AFTERWARDS = """
import sys, threading, time
import torch
from optexp.measurement import openmp

def on():
    end = time.thread_time() + 0.02
    while time.thread_time() < end:
        pass

torch.set_num_threads(2)
x = torch.randn(500, 500)
for line in sys.stdin:
    if line == "dismiss\\n":
        openmp.dismiss()
    elif sys.argv[1] == "operations":
        x.add(1.0)
    else:
        threading.Thread(target=on).start()
    print(flush=True)
"""


class Afterwards(Scripted):
    """An arm whose process does something after it has answered: `thread`, a hidden one; `operations`, OpenMP's."""

    def __init__(self, kind: str) -> None:
        super().__init__(1e-3)
        self.process = Popen([sys.executable, "-c", AFTERWARDS, kind], stdin=PIPE, stdout=PIPE, text=True)
        self.pid = self.process.pid
        self.ask("dismiss")

    def ask(self, what: str) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(what, file=self.process.stdin, flush=True)
        self.process.stdout.readline()

    def answer(self, method: str, **arguments: Any) -> Any:
        if method in ("block", "dismiss"):
            self.ask(method)
        return super().answer(method, **arguments)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="OpenMP needs a second core")
def test_what_an_arm_does_after_its_block_is_work_unless_openmp_looks_out_for_more() -> None:
    found, late = worked_afterwards()
    assert late["candidate"] > 0.012  # most of 20 ms: its answer waits for the interpreter's lock
    assert max(map(median, found.idle.values())) < 0.05  # each of them is waited for
    shares = [late["baseline"] / late["candidate"]]
    while shares[-1] >= 0.4 and len(shares) < 3:  # other programs make OpenMP's threads slow to go to sleep
        _, late = worked_afterwards()
        shares.append(late["baseline"] / late["candidate"])
    assert shares[-1] < 0.4, shares  # 0.02 if quiet; 0.44 and more if OpenMP's threads stayed


def worked_afterwards() -> tuple[Sample, dict[str, float]]:
    """By arm, mean seconds of work after a block."""
    arms = {"baseline": Afterwards("operations"), "candidate": Afterwards("thread")}
    try:
        found = measured(pairs=10, **arms)
    finally:
        for arm in arms.values():
            arm.process.kill()
            arm.process.communicate()
    return found, {name: fmean(block.worked_s for block in blocks) for name, blocks in found.late.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="the account is Linux's")
def test_a_core_that_somebody_else_wants_is_waited_for() -> None:
    forever = [sys.executable, "-c", "while True: pass"]
    with Popen(forever) as arm, Popen(forever) as other:
        for process in (arm, other):
            os.sched_setaffinity(process.pid, {min(os.sched_getaffinity(0))})
        begin, before = clock.now(), clock.account(arm.pid)
        time.sleep(0.5)
        after, seconds = clock.account(arm.pid), clock.now() - begin
        for process in (arm, other):
            process.kill()
    assert before is not None
    assert after is not None
    assert clock.taken_by_others(before, after, seconds) / seconds > 0.2
    assert clock.account(arm.pid) is None


def test_threads_of_an_arm_that_wait_for_each_other_lose_nothing() -> None:
    """Two that share its core, and nobody else: one is always ready and waits, and the core is never idle."""
    assert clock.taken_by_others((1.0, 0.5), (2.0, 1.5), core_s=1.0) == 0
    assert clock.taken_by_others((1.0, 0.5), (1.6, 1.5), core_s=1.0) == pytest.approx(0.4)
    assert clock.taken_by_others((1.0, 0.5), (1.6, 0.7), core_s=1.0) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("ran", "queued", "cores", "share"),
    [
        (0.7, 0.3, 1, 0.3),  # one thread: of the time
        (0.7, 0.3, 16, 0.3),  # cores that it had no use for make it no better
        (1.0, 1.0, 2, 0.5),  # two: each had half of what it asked for
        (0.9, 1.1, 2, 0.55),
        (0.01, 0.01, 2, 0.01),  # one that sleeps asks for little
        (-3.0, 4.0, 2, 1.0),  # a thread ended
    ],
)
def test_what_others_take_is_a_share(ran: float, queued: float, cores: int, share: float) -> None:
    assert clock.share_taken((5.0, 5.0), (5.0 + ran, 5.0 + queued), 1.0, cores) == pytest.approx(share)


@pytest.mark.skipif(sys.platform != "linux", reason="the state of threads is Linux's")
def test_a_block_begins_when_other_arms_are_at_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its threads may look out for more work, on cores that the next arm needs."""
    work = "import time; print(flush=True); end = time.time() + {}\nwhile time.time() < end: pass\ntime.sleep(60)"
    arm, other = Scripted(1e-3), Scripted(1e-3)
    with (
        Popen([sys.executable, "-c", work.format(0.5)], stdout=PIPE) as brief,
        Popen([sys.executable, "-c", work.format(60)], stdout=PIPE) as endless,
    ):
        assert brief.stdout
        assert endless.stdout
        endless.stdout.readline()
        begin = clock.now()
        clock.until_at_rest(endless.pid, 0.1)
        assert clock.now() - begin >= 0.1
        endless.kill()
        monkeypatch.setattr(sampling, "REST_S", 20.0)
        other.pid = brief.pid  # type: ignore[attr-defined]
        brief.stdout.readline()
        taken({"baseline": other, "candidate": arm}, MeasurementSettings(), Random(0), 1)
        assert arm.calls
        assert not clock._runs(brief.pid)
        brief.kill()
    clock.until_at_rest(brief.pid, 60)  # it is gone
