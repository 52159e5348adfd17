"""Is the first step after building like any other from the same state?

What only the first call does, as to warm up on the live model, shows in no later step. Python state that it is told by
is put back before every check; state that cannot be put back shows here: in the digest of that one step.
"""

from __future__ import annotations

from collections.abc import Mapping

from optexp.equivalence import step_digest
from optexp.equivalence.missed import End
from optexp.records.verification import Finding
from optexp.verification.recheck import Repetitions, findings_of
from optexp.workers.arm import Arm
from optexp.workers.client import Client

GATE = "FIRST"
SCALED = "after/scaler/"  # a loss scale is settled after the first step


def check_first_step(
    yardstick: Client[Arm],
    candidate: Client[Arm],
    in_turns: bool = False,
    zeros: Mapping[str, float] = step_digest.NO_ZEROS,
) -> tuple[list[Finding], list[str]]:
    """Findings of FIRST, and names of state that the baseline's own first step leaves otherwise than its repetitions.

    A difference that the baseline has likewise is no finding.

    in_turns: only the arm that takes a step holds batches
    zeros:    sizes of terms of gradients that are zero but for rounding
    """
    left = candidate.call(Arm.first_step)
    if any(name.startswith(SCALED) for name in left):
        return [], []
    theirs = yardstick.call(Arm.first_step)
    alone = Repetitions(yardstick, yardstick, in_turns, zeros=zeros)
    own = alone.astray(theirs, End(1))
    alone.rest()
    repetitions = Repetitions(yardstick, candidate, in_turns, zeros=zeros)
    astray = repetitions.astray(left, End(1))
    if astray:  # what is chosen at the first call, as a convolution's algorithm, may round otherwise
        astray = step_digest.astray(left, repetitions.made[End(1)], repetitions.by_noise(End(1)), zeros=zeros)
    if own and astray:
        beside = step_digest.astray(left, [theirs], repetitions.by_noise(End(1)), zeros=zeros)
        astray = {name: text for name, text in astray.items() if name not in own or name in beside}
    repetitions.rest()
    return findings_of(GATE, astray), sorted(own)
