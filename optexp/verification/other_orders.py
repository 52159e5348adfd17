"""Runs of the baseline in other orders where arms take turns: made only for what fails without them.

There one plain run sets the limits, as large tensors leave little memory. A sum that cancels, or a factor that many
elements share, makes one run a lottery.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf

from optexp.errors import Failure
from optexp.records.verification import Finding
from optexp.support.shortage import OUT_OF_MEMORY


def measurably(found: Sequence[Finding]) -> bool:
    """Whether something fails, and all that fails by an error with a limit. Where TF32 is allowed, the limit of a plain
    run may be 2^13 times too narrow."""
    wrong = [finding.used for finding in found if not finding.ok]
    return bool(wrong) and max(wrong) < inf


def fits(measure: Callable[[], None]) -> bool:
    """Make runs; False where memory does not suffice."""
    try:
        measure()
    except Failure as reason:
        if reason.type != OUT_OF_MEMORY:
            raise
        return False
    return True


def widened(before: Sequence[Finding], after: Sequence[Finding]) -> list[Finding]:
    """Findings of another run by wider limits, but for tensors whose error in the first run is beyond these, too: a
    wrong result may be right the next time."""
    wrong = {finding.tensor: finding for finding in before if not finding.ok}
    return [f if (w := wrong.get(f.tensor)) is None or _within(w, f) else w for f in after]


def _within(wrong: Finding, wider: Finding) -> bool:
    """Whether the errors of the whole tensor and of its worst element lie within another finding's limits."""
    gates = [gate for gate in ("G1", "G2") if gate in wrong.allowed and gate in wider.allowed]
    return bool(gates) and all(wrong.allowed[gate][0] <= wider.allowed[gate][1] for gate in gates)
