"""ARM: batches as the program's feed gives them, to be held beside those of another workload's feed."""

from __future__ import annotations

from itertools import repeat

from optexp.program import Batch
from optexp.support import random_state
from optexp.workers.arm_timing import Timing
from optexp.workers.first_batches import first_batches, given, later, shown
from optexp.workers.messages import Fed, Given


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

    def fed_later(self, positions: list[int]) -> dict[int, Given]:
        """Batches of the loader's first epoch, as many as a few seconds give."""
        self._begin(0)
        return {position: given(batch) for position, batch in later(self.program.feed, positions)}

    def shown_later(self, position: int) -> dict[str, list[float]]:
        """Elements of one of them."""
        self._begin(0)
        return next(shown(batch) for _, batch in later(self.program.feed, [position]))

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
