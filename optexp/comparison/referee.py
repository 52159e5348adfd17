"""The arms that verify one stack before timing, and those that stay for the check after timing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from optexp.comparison.case import Case
from optexp.comparison.first_and_later_step import (
    check_first_step,
    check_later_step,
    check_moved_parameters,
    check_rare_steps,
    check_repetitions,
)
from optexp.comparison.odd_sizes import check_odd_sizes
from optexp.comparison.same_batches import Feeds
from optexp.equivalence import step_digest
from optexp.equivalence.effects import title
from optexp.equivalence.missed import End
from optexp.equivalence.process_state import undeclared
from optexp.errors import Failure, NoReference
from optexp.records.verification import Verification, broken
from optexp.support.stopwatch import Stopwatch
from optexp.verification.timed_arm import TimedArm
from optexp.verification.verify import verify, verify_randomness
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.peer import Peer
from optexp.workers.reference import Reference

A = TypeVar("A")
DRAWS = (
    "with every dropout at p = 0 the {} draws random numbers that its results depend on, and the baseline draws none: a"
    " dropout written by hand cannot be held against fp64; use torch's (nn.Dropout, F.dropout)"
)


@dataclass
class Referee:
    """The arms that judge a case, and what they found so far.

    found:     the verification
    changed:   global settings that the stack changed in its process, as "before → after"
    reference: the reference arm; None before `verify`
    yardstick: the yardstick after timing; None where the measured baseline serves as one
    drawing:   arms that draw random numbers although every dropout has rate 0
    """

    case: Case

    def __post_init__(self) -> None:
        self.found = Verification(str(self.case.promise))
        self.watch = Stopwatch()
        self.changed: Mapping[str, str] = {}
        self.reference: Client[Reference] | None = None
        self.yardstick: Client[Arm] | None = None
        self.drawing = set[str]()

    def verify(self, arms: Mapping[str, Client[Arm]], judge: Client[Reference], bare: Client[Arm]) -> Verification:
        """Run all checks before timing, on arms that have been set up; `bare` is the bare program's."""
        case, session = self.case, self.case.session
        self.reference = judge
        checked = self._without_dropout() if case.steps.random else arms
        with session.working("verification", "comparing with fp64 on fresh inputs"):
            found = self._at_own_sizes(checked, arms, self.watched(judge))
        for arm in checked.values() if case.steps.random else ():
            arm.close()
        if found.ok and case.rebuilt:
            seed = session.draws.seed("loader", 0)
            watched = self.watched(bare), self.watched(arms[case.name]), self.watched(judge)
            self._compare_batches(found, Feeds(*watched, seed))
        if found.ok and session.settings.thorough:
            for workload in session.workload.tails():
                check_odd_sizes(case, workload, found, self.watch)
        self._note_settings(found, arms[case.name], bare)
        found.seconds = self.seconds
        self.found = found
        return found

    def _at_own_sizes(
        self, checked: Mapping[str, Client[Arm]], arms: Mapping[str, Client[Arm]], reference: Client[Reference]
    ) -> Verification:
        """Run the checks at the workload's own sizes.

        checked: arms without dropout
        arms:    arms as they are measured; the same where nothing is random
        """
        case, session = self.case, self.case.session
        yardstick, candidate = self.watched(checked["yardstick"]), self.watched(checked[case.name])
        measured = self.watched(arms["yardstick"]), self.watched(arms[case.name])
        if case.steps.random:
            reference.call(Reference.silence)
        found = self._against_fp64(reference, yardstick, candidate)
        if found.failures and self.drawing == {case.name} and candidate.call(Arm.throw, unit=case.unit).differ:
            raise NoReference(DRAWS.format(case.name))
        if found.ok:
            if session.in_turns:
                reference.call(Reference.rest)
            check_first_step(case, found, *measured)
        untimed = session.experiment.verify == "only"  # else the check after timing covers later steps
        if found.ok and (case.moves or untimed) and not case.steps.random and session.workload.mode != "train":
            check_later_step(case, found, reference, yardstick, candidate)
        if found.ok and session.workload.mode == "forward_backward":
            check_moved_parameters(case, found, reference, yardstick, candidate)
        if found.ok and case.steps.own and session.workload.mode == "train":
            check_rare_steps(case, found, reference, yardstick, candidate)
        if found.ok and untimed:
            check_repetitions(case, found, yardstick, candidate)
        if case.steps.random and found.ok:
            session.progress.update("comparing distributions at the real dropout")
            verify_randomness(found, reference, *measured, case.plan().seeds[0], case.unit)
        return found

    def _against_fp64(
        self, reference: Client[Reference], yardstick: Client[Arm], candidate: Client[Arm]
    ) -> Verification:
        """The gates; a failure names Python state of the model where that makes equal steps of the baseline differ."""
        try:
            update = self.case.session.progress.update
            found = verify(reference, yardstick, candidate, self.case.plan(), self.case.promise, update)
        except Failure as reason:
            undecided = reason.type == "NoReference"
            if not (undecided and (cause := unkept(yardstick))):
                raise
            raise replace(reason, message=f"{reason.message}; {cause}") from None
        found.unkept = unkept(yardstick) if found.undecided else ""
        if found.ok and not found.repeats:
            self._require_steady(found, yardstick)
        return found

    def _require_steady(self, found: Verification, yardstick: Client[Arm]) -> None:
        """A set of inputs in which equal steps happen to agree shows nothing where others leave results far apart.

        Raises:
            NoReference: They leave a tensor so far apart that its limits let wrong ones pass.
        """
        runs = [yardstick.call(Arm.repeated, end=End(1)) for _ in range(step_digest.MOST)]
        apart = step_digest.unsteady(runs, self.case.unit, found.sizes, found.zeros)
        if self.case.session.in_turns:
            yardstick.call(Arm.rest)
        if apart:
            name, share = max(apart.items(), key=lambda item: item[1])
            causes = unkept(yardstick) or "a step keeps what no arm can put back, as a clock, a count or a file"
            raise NoReference(f"equal steps of the baseline leave {title(name)} {100 * share:.2g} % apart: {causes}")

    def _compare_batches(self, found: Verification, feeds: Feeds) -> None:
        """Add a failure where the program is fed other batches than the baseline.

        Raises:
            NoReference: The batches may differ by random numbers, or differ by rounding and are to be timed.
        """
        case = self.case
        difference = feeds.difference()
        found.notes += [feeds.looked_at] if feeds.looked_at else []
        for arm in (feeds.baseline, feeds.candidate) if case.session.in_turns else ():
            arm.call(Peer.rest)
        if difference is None:
            return
        text = f"the {case.name} is fed other batches: {difference.text}"
        if not difference.rounding:
            found.failures = [replace(broken("inputs", difference.text), seed=case.session.experiment.seed)]
            found.ok, found.worst, found.headline = False, found.failures[0], text
        elif case.session.experiment.verify == "only":
            found.notes.append(f"{text}, by rounding alone")
        else:
            raise NoReference(f"{text}, by rounding alone: let both loaders give equal bits, or use verify=only")

    def _without_dropout(self) -> dict[str, Client[Arm]]:
        """New arms in which every dropout has rate 0, as compiled or captured programs keep the rate of their start."""
        session = self.case.session
        with session.working("arms", "starting arms without dropout"):
            specs = {name: replace(spec, dropout=False) for name, spec in self.case.specs().items()}
            starting = session.pool.start({f"{name} without dropout": spec for name, spec in specs.items()})
            self.drawing = {
                name for name, each in zip(specs, starting.values(), strict=True) if each.setup.wait().random
            }
        return {name: each.arm for name, each in zip(specs, starting.values(), strict=True)}

    def _note_settings(self, found: Verification, candidate: Client[Arm], bare: Client[Arm]) -> None:
        """Note the global settings that the stack changed, and the bare program did not."""
        declared = frozenset().union(*(strategy.changes for strategy in self.case.stack))
        history = candidate.call(Arm.settings), bare.call(Arm.settings)
        self.changed, found.state = undeclared(*history, ()), dict(undeclared(*history, declared))
        found.notes += [f"the {self.case.name} changes {name}: {change}" for name, change in found.state.items()]

    def watched(self, arm: Client[A]) -> Client[A]:
        """The same arm, whose answers are timed by check."""
        return TimedArm(arm, self.watch)

    @property
    def seconds(self) -> dict[str, float]:
        return {part: round(seconds, 3) for part, seconds in self.watch.seconds.items()}

    def stay(self, arms: Mapping[str, Client[Arm]], bare: str) -> None:
        """Keep the reference, and the yardstick unless the measured baseline serves as one; end the other arms."""
        measured = self.case.promise.dtype is None and not self.case.session.baseline
        self.yardstick = None if measured else arms.get("yardstick", arms[bare])
        assert self.reference is not None, "verify comes first"
        self.reference.call(Reference.rest)
        for arm in arms.values():
            if arm is not self.yardstick:
                arm.close()

    def leave(self) -> None:
        """End the arms that stayed."""
        arms: tuple[Client[Peer] | None, ...] = (self.reference, self.yardstick)
        for arm in arms:
            if arm is not None:
                arm.close()


def unkept(yardstick: Client[Arm]) -> str:
    """The Python state of the model that no arm can restore, in words; empty where there is none."""
    if not (names := yardstick.call(Arm.unkept)):
        return ""
    which = "an attribute" if len(names) == 1 else "attributes"
    return f"the model keeps {', '.join(names)}, {which} that cannot be put back before each step"
