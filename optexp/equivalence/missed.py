"""How often a check that looks at some steps misses a fault that not every step shows.

A block of the candidate ends after a number of steps, and begins on a batch, that are drawn anew each time, so that its
last step shows a fault with the probability with which any step does. Of `LOOKS` such ends, all miss a fault that shows
in a share p of the steps with probability (1 - p)^LOOKS.
"""

from __future__ import annotations

from math import ceil, log, log1p
from typing import NamedTuple

SHARE = 0.25  # of the steps, in which a fault shows: one of four batches
MISSED = 1e-3  # runs in which such a fault may pass


class End(NamedTuple):
    """The end of a timed block: its number of steps from the restored state, and the batch that the cycle began on."""

    steps: int
    first: int = 0


def miss_rate(share: float, looks: int) -> float:
    """Probability that none of `looks` independent steps shows a fault that a share of the steps shows."""
    return (1.0 - share) ** looks


def looks_for(share: float, missed: float) -> int:
    """The fewest independent steps that miss such a fault at most so often."""
    return ceil(log(missed) / log1p(-share))


LOOKS = looks_for(SHARE, MISSED)  # blocks whose ends are kept and repeated: 25
EVEN = round(1 / SHARE)  # longest looks are a multiple: of every so many calls each is as likely the last
