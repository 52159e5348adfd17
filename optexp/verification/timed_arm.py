"""PARENT: seconds that a verification waits for its processes, by kind of work. The asked method tells the kind."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Concatenate, ParamSpec, TypeVar

from optexp.support.stopwatch import Stopwatch
from optexp.workers.arm import Arm
from optexp.workers.client import Client, Pending
from optexp.workers.peer import Peer
from optexp.workers.reference import Reference

P = ParamSpec("P")
R = TypeVar("R")
A_co = TypeVar("A_co", covariant=True)

STEPS = "steps"  # kind of every method that PARTS leaves out: an arm's steps, with copies, poison and repetitions
PARTS: dict[Callable[..., Any], str] = {
    Arm.setup: "setup",
    Reference.setup: "setup",
    # drawing batches and computing their fp64 results
    **dict.fromkeys((Reference.draw, Reference.recall, Reference.info, Reference.dead, Reference.constant), "inputs"),
    # batches and results, through shared memory
    **dict.fromkeys((Reference.batch, Reference.expect, Reference.take, Arm.load), "transfer"),
    **dict.fromkeys((Peer.expect, Peer.by_host, Peer.fill, Peer.take), "transfer"),
    **dict.fromkeys((Reference.yardstick, Reference.judge, Reference.judge_timed, Reference.scatter), "gates"),
    **dict.fromkeys((Reference.power, Reference.distribution), "mutants"),
}


class TimedArm(Client[A_co]):
    """A client of an arm or of the reference, with a stopwatch that counts the parent's waiting. It times no block."""

    def __init__(self, arm: Client[A_co], watch: Stopwatch) -> None:
        self.arm, self.watch, self.name, self.pid = arm, watch, arm.name, arm.pid

    def start(self, method: Callable[Concatenate[A_co, P], R], *args: P.args, **kwargs: P.kwargs) -> Pending[R]:
        phase = PARTS.get(method, STEPS)
        with self.watch.phase(phase):  # an object in this process answers here
            pending = self.arm.start(method, *args, **kwargs)
        return Pending(partial(self._wait, phase, pending))

    def _wait(self, phase: str, pending: Pending[R]) -> R:
        with self.watch.phase(phase):
            return pending.wait()

    def close(self) -> None:
        self.arm.close()
