"""One verification under way: its plan, its three processes, and tensors on their way between them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from optexp.equivalence.bits import Bits
from optexp.equivalence.input_families import NORMAL, ONE_BY_ONE
from optexp.equivalence.judge import SetInfo
from optexp.errors import Failure, NoReference, Unshared
from optexp.records.verification import Finding, Verification
from optexp.strategy import Contract
from optexp.workers.arm import Arm
from optexp.workers.client import Client, Pending
from optexp.workers.messages import Look
from optexp.workers.peer import Peer
from optexp.workers.reference import Reference
from optexp.workers.transfer import Transfer

T = TypeVar("T")

SIDE_BY_SIDE = 2**28  # bytes of a run's tensors: with more of them, the baseline and the reference take turns
SPREAD_RUNS = 5  # yardstick runs of a baseline that does not repeat itself
STRAY = 2.0  # of a limit: the most that such a baseline's own run may use of it and count as a further yardstick run


@dataclass(frozen=True)
class Plan:
    """The plan of a verification.

    seeds:      of fresh normal inputs; the last of several exchanges one input after the other
    steps:      consecutive steps per seed; several where they change state, so that what is frozen shows
    families:   of other inputs, one set of each
    overwrites: the candidate says that a step overwrites what the one before returned
    power:      the gates must show that they see mutants
    follow:     training is followed for many steps
    apart:      two steps of the user's own were written apart: one may set a rate that the other multiplies
    in_turns:   only the arm that takes a step holds batches and results
    """

    seeds: Sequence[int]
    steps: int = 1
    families: Sequence[str] = ()
    overwrites: bool = False
    power: bool = True
    follow: bool = False
    apart: bool = False
    in_turns: bool = False

    @property
    def sets(self) -> list[tuple[int, str]]:
        """Seed and family of every set of inputs, the normal ones first."""
        *others, last = self.seeds
        normal = [*((seed, NORMAL) for seed in others), (last, ONE_BY_ONE if others else NORMAL)]
        return normal + [(self.seeds[0], family) for family in self.families if family != NORMAL]


@dataclass
class Trial:
    """One verification under way: the three that take part, and what they have said.

    in_turns: as the plan has it, or the reference, which knows the sizes of results
    holder:   where arms take turns, the one that has batches, and which of those drawn
    others_learn: other code changes parameters by these gradients
    keeps:    the candidate's runs of a set are kept, by step
    kept:     steps of this set that the candidate has run
    """

    reference: Client[Reference]
    yardstick: Client[Arm]
    candidate: Client[Arm]
    plan: Plan
    contract: Contract
    verification: Verification
    findings: list[Finding] = field(default_factory=list)
    bits: Bits = field(default_factory=Bits)
    in_turns: bool = False
    holder: tuple[Client[Arm], tuple[int, ...]] | None = None
    family: str = NORMAL
    others_learn: bool = False
    keeps: bool = False
    kept: set[int] = field(default_factory=set)

    def passed(self) -> bool:
        return all(finding.ok for finding in self.findings)

    def load(self, seed: int, family: str, count: int) -> SetInfo:
        """Fresh inputs to both arms."""
        arms, self.family = (self.yardstick, self.candidate), family
        if self.in_turns:
            self.rest(*arms)
        self.reference.call(Reference.draw, seed=seed, count=count, family=family)
        info = self.reference.call(Reference.info)
        self.others_learn, self.keeps, self.kept = info.others_learn, info.keeps, set()
        if info.in_turns and not self.in_turns:
            self.in_turns = True
            self.rest(*arms)
        if not self.in_turns:
            deliver(self.reference, arms, range(info.steps), family)
        return info

    def turn(self, arm: Client[Arm], *steps: int) -> Client[Arm]:
        """The arm, with the batches of these steps."""
        if self.in_turns and self.holder != (arm, steps):
            if self.holder is not None:
                self.rest(self.holder[0])
            deliver(self.reference, (arm,), steps, self.family)
            self.holder = arm, steps
        return arm

    def rest(self, *arms: Client[Arm]) -> None:
        """No arm holds a batch."""
        for arm in arms:
            arm.call(Arm.rest)
        self.holder = None

    def observe(self, arm: Client[Arm], look: Look) -> None:
        """One step of an arm, conveyed to the reference."""
        self.turn(arm, look.step)
        convey(arm.call(Arm.observe, look), arm, self.reference)
        if self.in_turns:
            arm.call(Arm.rest, keep_fresh=look.noise is not None)  # noisy runs follow each other
            self.holder = self.holder if look.noise is not None else None

    def measure(self, look: Look) -> None:
        """One more run of the baseline, from which the reference takes its yardsticks."""
        self.measure_all([look])

    def measure_all(self, looks: Iterable[Look]) -> None:
        """Several such runs; each look is asked for after the run before."""
        if not self.in_turns:
            take_yardsticks(looks, self.yardstick, self.reference)
            return
        for look in looks:
            self.observe(self.yardstick, look)
            self.reference.call(Reference.yardstick, step=look.step)

    def reorder(self, steps: Sequence[int], restart: bool, runs: int, first: int = 1) -> None:
        """Runs of the baseline in other orders (see `orders`)."""
        try:
            self.measure_all(orders(self.yardstick, runs, steps, restart, first))
        finally:
            if self.in_turns:
                self.rest(self.yardstick)

    def judge(self, look: Look) -> list[Finding]:
        """Findings of the gates on a run of the candidate: on the one that was kept, where there is one.

        What was wrong once may be right the next time, so no other run takes its place.
        """
        if look.step in self.kept and not look.repeating:
            return self.reference.call(Reference.judge_again, step=look.step)
        self.observe(self.candidate, look)
        keep = self.keeps and not look.repeating
        self.kept |= {look.step} if keep else set()
        return self.reference.call(Reference.judge, step=look.step, keep=keep)

    def add(self, findings: Sequence[Finding], seed: int, step: int, family: str) -> None:
        """Keep findings, with the inputs that they are about."""
        self.findings += [replace(finding, seed=seed, step=step, family=family) for finding in findings]


def take_yardsticks(looks: Iterable[Look], yardstick: Client[Arm], reference: Client[Reference]) -> None:
    """Runs of the baseline for the reference: it works on one of them while the baseline makes the next.

    Large ones are made one by one, as both would need memory at once.
    """
    working: Pending[None] | None = None
    try:
        for look in looks:
            run = yardstick.call(Arm.observe, look)
            if working is not None:
                working.wait()
            working = None
            convey(run, yardstick, reference)
            working = reference.start(Reference.yardstick, step=look.step)
            if run.size > SIDE_BY_SIDE:
                working.wait()
                working = None
    finally:
        if working is not None:
            working.wait()


def orders(
    yardstick: Client[Arm], runs: int, steps: Sequence[int], restart: bool = True, first: int = 1
) -> Iterator[Look]:
    """Looks at runs in other orders, as long as there is anything to reorder.

    The steps take turns: on another batch, the error of a few sums is another.

    restart: each step begins with the restored state; else only the first
    first:   number of the first order
    """
    for at in range(runs):
        order, step = first + at, steps[at % len(steps)]
        yield Look(step, restart or step == steps[0], order=order)
        if not yardstick.call(Arm.reassociated_operators):
            return


def deliver(reference: Client[Reference], arms: Sequence[Client[Arm]], indices: Iterable[int], family: str) -> None:
    """Some of what the reference has drawn, batch by batch."""
    for place, index in enumerate(indices):
        convey(reference.call(Reference.batch, index=index), reference, *arms)
        for arm in arms:
            arm.call(Arm.load, index=place, family=family)


def convey(transfer: Transfer, sender: Client[Peer], *receivers: Client[Peer]) -> None:
    """Every piece of a transfer: the next one is filled while one is taken."""
    try:
        expect(transfer, *receivers)
    except Failure as reason:
        if reason.type != Unshared.__name__:
            raise
        transfer = sender.call(Peer.by_host)
        expect(transfer, *receivers)
    sender.call(Peer.fill, piece=0)
    for piece in range(transfer.pieces):
        following = piece + 1
        filling = sender.start(Peer.fill, piece=following) if following < transfer.pieces else None
        try:
            for receiver in receivers:
                receiver.call(Peer.take, piece=piece)
        finally:
            if filling:
                filling.wait()


def expect(transfer: Transfer, *receivers: Client[Peer]) -> None:
    for receiver in receivers:
        receiver.call(Peer.expect, transfer=transfer)


def decided(judged: Callable[[], T]) -> T | None:
    """The judgement; None where the gates cannot decide by the runs of the baseline so far."""
    try:
        return judged()
    except Failure as reason:
        if reason.type != NoReference.__name__:
            raise
        return None


@dataclass
class Strays:
    """Runs of the baseline that its own limits refuse: one that lies just outside is a measure as the others are.

    seen: steps and tensors that a run has widened the yardsticks for
    """

    reference: Client[Reference]
    seen: set[tuple[int, str]] = field(default_factory=set)

    def judge(self, step: int) -> None:
        """Judge the run that was conveyed last.

        Raises:
            NoYardstick: It lies far outside of the limits, or another run has widened them already.
        """
        wrong = [finding for finding in self.reference.call(Reference.judge, step=step) if not finding.ok]
        for finding in wrong:
            if finding.used > STRAY or (step, finding.tensor) in self.seen:
                raise NoYardstick(finding)
        if wrong:
            self.reference.call(Reference.yardstick, step=step)
            self.seen |= {(step, finding.tensor) for finding in wrong}


class NoYardstick(Failure):
    """The baseline fails beside itself: no candidate can be blamed, and none verified."""

    def __init__(self, wrong: Finding) -> None:
        super().__init__(
            "NoReference",
            f"the baseline does not pass beside itself ({wrong.tensor}: {wrong.message}): its steps depend on what no"
            " arm can restore, as a clock, a counter or random numbers that torch does not draw",
        )
