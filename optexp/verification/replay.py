"""The last step of a block, replayed in both arms from the restored state, and judged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from optexp.equivalence.input_families import NORMAL
from optexp.equivalence.judge import SetInfo
from optexp.equivalence.missed import End
from optexp.equivalence.trajectory import TIMED
from optexp.records.verification import Finding
from optexp.verification.other_orders import beside_other_orders
from optexp.verification.trial import SPREAD_RUNS, Strays, convey, decided, deliver, orders, take_yardsticks
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.messages import Look
from optexp.workers.reference import Reference

DRIFT_RUNS = 3  # runs of the baseline with noise in its first parameters


@dataclass(frozen=True)
class Replay:
    """One step, and how it is replayed.

    end:      of the block
    timed:    the results that the block itself returned are judged, too; their step started from the same state
    in_turns: only the arm that takes a step holds batches and results
    renewed:  halfway the batches get other values
    noise:    seed of a little of it in the parameters that the judged arm begins with
    drifts:   what a step keeps in Python may differ as far as such noise moves it in the baseline
    late:     counts move on to it after the first steps
    moved:    halfway parameters get other values in place
    forgets:  then what the judged arm keeps in Python becomes what it was at first
    apart:    after the first step copies of parameters that steps keep get other values
    """

    reference: Client[Reference]
    yardstick: Client[Arm]
    end: End
    timed: bool = False
    in_turns: bool = False
    renewed: bool = False
    noise: int | None = None
    drifts: bool = False
    late: int | None = None
    moved: bool = False
    forgets: bool = False
    apart: bool = False

    def judged(self, candidate: Client[Arm], steady: bool = True) -> list[Finding]:
        """Findings of the gates about the candidate's step.

        steady: the baseline repeats itself; one that does not has to pass beside itself before a candidate is blamed

        Raises:
            NoYardstick: The baseline does not pass either.
        """
        findings = self._judged(candidate)
        if not steady and not all(finding.ok for finding in findings) and self._itself():
            self._convey_judged(candidate)
            return self._findings()
        return findings

    def _judged(self, candidate: Client[Arm]) -> list[Finding]:
        """Further runs of the baseline only widen limits: they are made where the step does not pass without them."""
        reference = self.reference
        if self.in_turns:
            reference.call(Reference.rest)
        self._convey(self.yardstick)
        reference.call(Reference.recall)
        reference.call(Reference.yardstick, step=TIMED)
        for seed in range(DRIFT_RUNS) if self.drifts else ():
            self._convey(self.yardstick, noise=seed + 1)
            reference.call(Reference.drift)
        info = reference.call(Reference.info)
        if info.keeps:
            self._convey_judged(candidate)
            at_once = decided(lambda: self._findings(keep=True))
            if at_once is not None and all(finding.ok for finding in at_once):
                return at_once
        self._disturb(info)

        def judged() -> list[list[Finding]]:
            if info.keeps:
                return [self._findings_again()]
            self._convey_judged(candidate)
            return [self._findings()]

        usual = info.reassociated_runs
        (found,) = beside_other_orders(judged(), usual, self.in_turns, self._reorder, judged)
        return found

    def _convey_judged(self, arm: Client[Arm]) -> None:
        self._convey(arm, self.timed, self.noise, self.forgets)

    def _convey(self, arm: Client[Arm], timed: bool = False, noise: int | None = None, forgets: bool = False) -> None:
        """The arm's step to the reference."""
        seen = arm.call(
            Arm.replay,
            end=self.end,
            timed=timed,
            renewed=self.renewed,
            noise=noise,
            late=self.late,
            moved=self.moved,
            forgets=forgets,
            apart=self.apart,
        )
        convey(seen, arm, self.reference)
        if self.in_turns:
            arm.call(Arm.rest)

    def _findings(self, keep: bool = False) -> list[Finding]:
        found = self.reference.call(Reference.judge, step=TIMED, keep=keep)
        return [*found, *self.reference.call(Reference.judge_timed, step=TIMED)] if self.timed else found

    def _findings_again(self) -> list[Finding]:
        found = self.reference.call(Reference.judge_again, step=TIMED)
        return [*found, *self.reference.call(Reference.judge_timed, step=TIMED, again=True)] if self.timed else found

    def _disturb(self, info: SetInfo) -> None:
        """Widen the yardstick by runs of the baseline with a little noise, and with sums in another order."""
        looks = (Look(TIMED, noise=noise + 1) for noise in range(info.noisy_steps))
        self._measure(looks, wanted=info.noisy_steps)
        if not self.in_turns:
            self._reorder(info.reassociated_runs)

    def _reorder(self, runs: int, first: int = 1) -> None:
        """Widen the yardstick by runs of the baseline with sums in another order."""
        self._measure(orders(self.yardstick, runs, [TIMED], first=first), wanted=runs)

    def _measure(self, looks: Iterable[Look], wanted: int) -> None:
        if not wanted:
            return
        deliver(self.reference, [self.yardstick], range(1), NORMAL)
        try:
            take_yardsticks(looks, self.yardstick, self.reference)
        finally:
            if self.in_turns:
                self.yardstick.call(Arm.rest)

    def _itself(self) -> bool:
        """Whether further runs of the baseline have widened its yardsticks; NoYardstick where it fails by itself."""
        strays = Strays(self.reference)
        for _ in range(SPREAD_RUNS):
            self._convey(self.yardstick)
            strays.judge(TIMED)
        return bool(strays.seen)
