"""Further runs of the baseline in other orders: made only for what fails without them, or lies far from float64.

Where arms take turns, one plain run sets the limits at first, as large tensors leave little memory. A sum that cancels,
or a factor that many elements share, makes one run a lottery, and a few runs, too, where a tensor has many such blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from math import inf

from optexp.errors import Failure
from optexp.records.verification import Finding
from optexp.support.shortage import OUT_OF_MEMORY

# Of 200 blocks with one error each, one lies beyond four times the largest of 5 runs in every fourth step, and beyond
# that of 17 runs in one of 6,000.
MORE = 12  # orders
NARROW = 4.0  # times a limit: what is further off is another result
PARTS = {"G2", "G3"}

Found = list[list[Finding]]  # by step


def beside_other_orders(
    found: Found, usual: int, in_turns: bool, measure: Callable[[int, int], None], judged: Callable[[], Found]
) -> Found:
    """Findings after runs in other orders, where these may explain failures; the same where memory does not suffice.

    usual:    orders that are made for arms that do not take turns
    in_turns: none was made yet
    measure:  makes runs: how many, and the number of the first order
    judged:   findings of another run of the candidate, or of the one that was kept
    """
    for runs, first, worth in ((usual if in_turns else 0, 1, _measurable), (MORE, usual + 1, _narrow)):
        if runs and worth([*chain.from_iterable(found)]) and _fits(partial(measure, runs, first)):
            found = list(map(widened, found, judged()))
    return found


def beside_lotteries(
    found: Found, usual: int, measure: Callable[[int, int], None], judged: Callable[[], Found]
) -> Found:
    """Findings after runs in other orders where the baseline lies further from float64 than a few runs explain: one
    rounding may take a ReLU to its other side. All else keeps the limits that it was judged by.

    usual:   orders that were made
    measure: makes runs: how many, and the number of the first order
    judged:  findings by wider limits
    """
    if not any(map(_is_parted, chain.from_iterable(found))) or not _fits(partial(measure, MORE, usual + MORE + 1)):
        return found
    wider = [{finding.tensor: finding for finding in each} for each in judged()]
    return [[_seen_by(f, after.get(f.tensor)) for f in each] for each, after in zip(found, wider, strict=True)]


def _is_parted(finding: Finding) -> bool:
    return finding.parted and bool(finding.unseen)


def _seen_by(finding: Finding, wider: Finding | None) -> Finding:
    """The finding, with the reason that wider limits give where it is unseen for the baseline's distance."""
    if wider is None or not _is_parted(finding):
        return finding
    return replace(finding, unseen=wider.unseen, parted=wider.parted)


def _measurable(found: Sequence[Finding]) -> bool:
    """Whether something fails, and all that fails by an error with a limit. Where TF32 is allowed, the limit of a plain
    run may be 2^13 times too narrow."""
    wrong = [finding.used for finding in found if not finding.ok]
    return bool(wrong) and max(wrong) < inf


def _narrow(found: Sequence[Finding]) -> bool:
    """Whether something fails, and all that fails does so in a block or an element alone, and by little: a tensor as a
    whole has so many errors that a few runs tell their size. Or by integers that equal elements decide."""
    wrong = [finding for finding in found if not finding.ok]
    return bool(wrong) and all(f.tied or ({*f.failed} <= PARTS and f.used < NARROW) for f in wrong)


def _fits(measure: Callable[[], None]) -> bool:
    """Make runs; False where memory does not suffice."""
    try:
        measure()
    except Failure as reason:
        if reason.type != OUT_OF_MEMORY:
            raise
        return False
    return True


def widened(before: Sequence[Finding], after: Sequence[Finding]) -> list[Finding]:
    """Findings by wider limits, but for tensors whose error in an earlier run is beyond these, too: a wrong result may
    be right the next time."""
    wrong = {finding.tensor: finding for finding in before if not finding.ok}
    return [f if (w := wrong.get(f.tensor)) is None or _within(w, f) else w for f in after]


def _within(wrong: Finding, wider: Finding) -> bool:
    """Whether the errors of the whole tensor and of its worst element lie within another finding's limits."""
    if wrong.tied:
        return True
    gates = [gate for gate in ("G1", "G2") if gate in wrong.allowed and gate in wider.allowed]
    return bool(gates) and all(wrong.allowed[gate][0] <= wider.allowed[gate][1] for gate in gates)
