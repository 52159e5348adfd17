"""Every second that a verification waits for an arm is counted, once, under what it was asked for."""

from __future__ import annotations

import time
from typing import Any

from optexp.equivalence.watched import PARTS, Watched
from optexp.reference import Reference
from optexp.stopwatch import Stopwatch


class Slow:
    name = "slow"

    def call(self, method: str, **arguments: Any) -> str:
        time.sleep(0.01)
        return method

    def start(self, method: str, **arguments: Any) -> None:
        self.started = method

    def wait(self) -> str:
        time.sleep(0.01)
        return self.started


def test_answers_are_counted_by_what_they_are_for():
    watch = Stopwatch()
    arm = Watched(Slow(), watch)
    assert arm.call("observe", step=0) == "observe"
    assert arm.call("judge", step=0) == "judge"
    assert arm.call("take", piece=0) == "take"
    arm.start("fill", piece=1)
    assert arm.wait() == "fill"
    assert {"steps", "gates", "transfer"} == watch.seconds.keys()
    assert min(watch.seconds["steps"], watch.seconds["gates"], watch.seconds["transfer"] / 2) >= 0.01


def test_what_is_counted_apart_is_something_that_arms_answer():
    assert all(hasattr(Reference, method) for method in PARTS)
