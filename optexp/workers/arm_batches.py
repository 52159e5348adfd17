"""ARM: batches as the program's feed gives them, to be held beside those of another workload's feed."""

from __future__ import annotations

from itertools import repeat

from optexp.program import Batch
from optexp.support import random_state
from optexp.workers.arm_timing import Timing
from optexp.workers.first_batches import first_batches, shown
from optexp.workers.messages import Fed


class Batches(Timing):
    """The first batches of the feed, from the restored state on."""

    def fed(self, other_seed: int = 0) -> Fed:
        """The first batches.

        Args:
            other_seed: Added to the seed of random numbers that a loader draws.
        """
        self._begin(other_seed)
        found = first_batches(self.program.feed, self._take, len(self.batches))
        self.program.feed.pause()
        return found

    def shown(self, index: int) -> dict[str, list[float]]:
        """Elements of one of these batches, by the names of its inputs (see `optexp.workers.first_batches.shown`)."""
        self._begin(0)
        for _ in repeat(None, index):
            self._take()
        found = shown(self._take())
        self.program.feed.pause()
        return found

    def _begin(self, other_seed: int) -> None:
        self.batches = []  # drawn once more
        self.restore()
        if other_seed:
            random_state.seed(self.draws + other_seed)
            self.program.feed.pause()

    def _take(self) -> Batch:
        assert self.offered is not None, "setup comes first"
        self.offered.due += 1
        return self.program.feed.next()
