"""Every second that a verification waits for a process is counted once, under the kind of work."""

from __future__ import annotations

import time

import pytest

from optexp.errors import Failure
from optexp.support.stopwatch import Stopwatch
from optexp.verification.timed_arm import TimedArm
from optexp.workers.client import InProcess
from optexp.workers.reference import Reference


class Slow(Reference):
    def yardstick(self, step: int) -> None:
        time.sleep(0.01)

    def take(self, piece: int) -> None:
        time.sleep(0.01)

    def silence(self) -> None:
        time.sleep(0.01)


def test_answers_are_counted_by_kind_of_work() -> None:
    watch = Stopwatch()
    arm = TimedArm(InProcess(Slow(), "slow"), watch)
    arm.call(Reference.silence)
    arm.call(Reference.yardstick, step=0)
    arm.call(Reference.take, piece=0)
    arm.start(Reference.take, piece=1).wait()
    assert {"steps", "gates", "transfer"} == watch.seconds.keys()
    assert min(watch.seconds["steps"], watch.seconds["gates"], watch.seconds["transfer"] / 2) >= 0.01


def test_a_failure_is_that_of_the_arm() -> None:
    arm = TimedArm(InProcess(Reference(), "reference"), Stopwatch())
    with pytest.raises(Failure, match="reference"):
        arm.call(Reference.judge, step=0)
