"""Was the result that was timed the right one? The last step of a timed block is repeated and judged.

The candidate repeats the block from its restored start, so that the state before its last step is known; the baseline
does the same and is the yardstick. What the block itself returned is judged beside what its repetition returns, and
all that it left behind is held against what repetitions leave.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from optexp.equivalence import step_digest
from optexp.equivalence.effects import title
from optexp.equivalence.missed import SHARE, End, miss_rate
from optexp.records.verification import Finding, Recheck, broken
from optexp.verification.replay import Replay
from optexp.workers.arm import Arm
from optexp.workers.client import Client
from optexp.workers.peer import Peer
from optexp.workers.reference import Reference

RANDOM = "steps draw random numbers: what was timed is held against repetitions, not against fp64"


def recheck(
    reference: Client[Reference],
    yardstick: Client[Arm],
    candidate: Client[Arm],
    moves: bool,
    random: bool,
    in_turns: bool = False,
    steady: bool = True,
    unit: float = 2.0**-24,
    zeros: Mapping[str, float] = step_digest.NO_ZEROS,
) -> tuple[list[Finding], Recheck]:
    """Findings of the gates, and what was done.

    moves:  steps change what later ones start from, so that a candidate that does not repeat itself has no second run
            that starts its last step from the same state
    random: steps draw random numbers, which no other arm draws too
    in_turns: only the arm that takes a step holds batches and results
    steady: the baseline repeats itself
    unit:   u of the promised arithmetic
    zeros:  sizes of terms of gradients that are zero but for rounding
    """
    ends = candidate.call(Arm.timed_ends)
    if not ends:
        return [], Recheck(note="no block was kept")
    parties: tuple[Client[Peer], ...] = (reference, yardstick, candidate)
    for party in parties if in_turns else ():
        party.call(Peer.rest)
    findings, repetitions = repeated(yardstick, candidate, ends, in_turns, unit, zeros)
    note = RANDOM if random else ""
    if not random:
        repeats = not moves or candidate.call(Arm.repeats, times=1)
        if not repeats:
            note = (
                "the candidate does not repeat itself bit for bit: what was timed is held against repetitions, and one"
                " of them against fp64"
            )
        if in_turns:
            candidate.call(Arm.rest)
        findings += Replay(reference, yardstick, ends[0], repeats, in_turns).judged(candidate, steady)
    found = Recheck(
        steps=ends[0].steps,
        ends=[end.steps for end in ends],
        repetitions=repetitions,
        missed=miss_rate(SHARE, len(ends)),
        note=note,
        ok=all(finding.ok for finding in findings),
    )
    return findings, found


def repeated(
    yardstick: Client[Arm],
    candidate: Client[Arm],
    ends: Sequence[End],
    in_turns: bool = False,
    unit: float = 2.0**-24,
    zeros: Mapping[str, float] = step_digest.NO_ZEROS,
) -> tuple[list[Finding], int]:
    """Tensors that timed steps left and their repetitions did not, and the number of repetitions.

    ends: of each kept block
    """
    repetitions, astray = Repetitions(yardstick, candidate, in_turns, unit, zeros), dict[str, str]()
    for index, end in enumerate(ends):
        if astray := repetitions.astray(candidate.call(Arm.timed, index=index), end):
            break
    repetitions.rest()
    return findings_of("REPEATED", astray), sum(map(len, repetitions.made.values()))


def findings_of(gate: str, astray: Mapping[str, str]) -> list[Finding]:
    return [replace(broken(title(name), text), gate=gate, failed=(gate,)) for name, text in astray.items()]


@dataclass
class Repetitions:
    """Of the same steps from the restored state, by how many they are: as many as it takes.

    in_turns: only the arm that repeats steps holds batches
    unit:     u of the promised arithmetic
    zeros:    sizes of terms of gradients that are zero but for rounding
    made:     the candidate's;  moved: the baseline's, the first as it is and others with a little noise
    holding:  the arm that repeated steps last
    """

    yardstick: Client[Arm]
    candidate: Client[Arm]
    in_turns: bool = False
    unit: float = 2.0**-24
    zeros: Mapping[str, float] = field(default_factory=dict)
    made: dict[End, list[step_digest.Digest]] = field(default_factory=dict)
    moved: dict[End, list[step_digest.Digest]] = field(default_factory=dict)
    holding: Client[Arm] | None = None

    def astray(self, left: step_digest.Digest, end: End) -> dict[str, str]:
        """Differences, in words, between tensors after these steps of the candidate and after repetitions, by name."""
        again = self.made.setdefault(end, [])
        astray = self._beside(left, again) if again else dict.fromkeys(left, "")
        while astray and len(again) < step_digest.MOST:
            again.append(self._repeated(self.candidate, end))
            astray = self._beside(left, again)
        if any(other != again[0] for other in again):
            astray = self._beside(left, again, self.by_noise(end))
        return astray

    def one_more(self, end: End) -> dict[str, str]:
        """The same of one more repetition."""
        return self.astray(self._repeated(self.candidate, end), end)

    def _beside(
        self, left: step_digest.Digest, again: Sequence[step_digest.Digest], moved: Sequence[step_digest.Digest] = ()
    ) -> dict[str, str]:
        return step_digest.astray(left, again, moved, self.unit, self.zeros)

    def by_noise(self, end: End) -> list[step_digest.Digest]:
        if end not in self.moved:
            noise = range(step_digest.DISTURBED + 1)  # the first without any
            self.moved[end] = [self._repeated(self.yardstick, end, seed or None) for seed in noise]
        return self.moved[end]

    def rest(self) -> None:
        """Let no arm hold batches, where arms take turns."""
        if self.in_turns and self.holding is not None:
            self.holding.call(Arm.rest)
        self.holding = None

    def _repeated(self, arm: Client[Arm], end: End, noise: int | None = None) -> step_digest.Digest:
        if self.holding is not arm:
            self.rest()
        self.holding = arm
        return arm.call(Arm.repeated, end=end, noise=noise)
