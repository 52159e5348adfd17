"""First looks of a search: arms of several stacks are set up side by side, and time a few steps in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from optexp.comparison.evaluation import rest
from optexp.comparison.first_look import LOOKS, SHORT_S, mean_s, rounds_of
from optexp.comparison.screening import GAIN, Looked, Stack
from optexp.comparison.session import Session
from optexp.errors import Failure, Unsupported
from optexp.workers.arm import Arm
from optexp.workers.client import Client

LONG_GAIN = 1.03  # least speedup of looks at long steps, whose times repeat
SHARE = 0.4  # most of the remaining budget that the looks of one survey take
ROOM = 3  # times the memory of the kept stack: another stack may need that much


class TimedLooks:
    """Looks at stacks beside the kept one, whose arm lives until the end.

    Args:
        kept: The stack that has to be beaten.

    gain: least speedup that is no noise
    """

    def __init__(self, session: Session, kept: Stack) -> None:
        self.session = session
        gpu = session.machine.gpu
        before = gpu.free_mib() if gpu else None
        starting = session.pool.start({"kept": session.spec(kept)})["kept"]
        self.kept, setup = starting.arm, starting.setup.wait()
        self.rounds = rounds_of(setup.step_s)
        self.gain = GAIN if setup.step_s < SHORT_S else LONG_GAIN
        after = gpu.free_mib() if gpu else None
        # A CPU's arms use all its cores, and would only wait for each other.
        self.abreast = 1
        if before and after and not session.in_turns:
            room = int(after / (ROOM * max(before - after, 1.0)))
            self.abreast = max(1, min(len(session.machine.own_cores), room))

    def __call__(self, stacks: Sequence[Stack]) -> list[Looked]:
        """A look at each stack."""
        groups = (stacks[first : first + self.abreast] for first in range(0, len(stacks), self.abreast))
        return [looked for group in groups for looked in self._side_by_side(group)]

    def _side_by_side(self, stacks: Sequence[Stack]) -> list[Looked]:
        names = [f"look{number}" for number in range(len(stacks))]
        specs = {name: self.session.spec(stack) for name, stack in zip(names, stacks, strict=True)}
        looks, arms = dict[str, Looked](), dict[str, Client[Arm]]()
        try:
            starting = self.session.pool.start(specs)
            arms = {name: started.arm for name, started in starting.items()}
            for name, started in starting.items():
                try:
                    started.setup.wait()
                except (Unsupported, Failure) as reason:
                    looks[name] = Looked(None, str(reason), isinstance(reason, Unsupported))
            looks |= self._timed({name: arm for name, arm in arms.items() if name not in looks})
        except Failure as failure:  # the kept stack's arm failed, or the time is over
            looks |= {name: Looked(None, str(failure)) for name in names if name not in looks}
        for arm in arms.values():
            arm.close()
        return [looks[name] for name in names]

    def _timed(self, arms: dict[str, Client[Arm]]) -> dict[str, Looked]:
        """Looks at arms that are set up; the kept stack's turns come between theirs."""
        kept_s, steps_s, failed = list[float](), {name: list[float]() for name in arms}, dict[str, Looked]()
        for _ in range(LOOKS if arms else 0):
            kept_s.append(self._mean_s(self.kept))
            for name in arms.keys() - failed.keys():
                try:
                    steps_s[name].append(self._mean_s(arms[name]))
                except Failure as failure:
                    failed[name] = Looked(None, str(failure))
        return failed | {n: Looked(min(kept_s) / max(min(s), 1e-9)) for n, s in steps_s.items() if n not in failed}

    def _mean_s(self, arm: Client[Arm]) -> float:
        step_s = mean_s(arm, self.rounds)
        rest(self.session, arm)
        return step_s


@contextmanager
def within(session: Session, until_s: float) -> Iterator[None]:
    """Inside, no worker's answer is awaited for longer than a share of the time until `until_s`."""
    before, now = session.pool.until_s, time.monotonic()
    session.pool.until_s = min(before, now + SHARE * (until_s - now))
    try:
        yield
    finally:
        session.pool.until_s = before
