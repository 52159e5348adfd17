"""How the next batch reaches the device."""

from __future__ import annotations

from typing import Protocol

import torch

from optexp.program.batches import Batch, Source, map_batch
from optexp.program.offered import Place, offered


class Feed(Protocol):
    """How the next batch reaches the device. The core owns the source; a feed only brings it.

    Inherit from it: what it defines here fits feeds that do nothing in the background.
    """

    device: torch.device

    def next(self) -> Batch:
        """The batch of the step that asks: the n-th since `reset` is `source[n % len(source)]`."""
        ...

    def reset(self, source: Source) -> None:
        """Start again from `source[0]`; drop whatever was prefetched.

        Keep the source and take nothing from it here: a batch is taken when a step asks for it, or so many before as
        `queue` says. Earlier is INVALID: results could be computed before the clock runs.
        """
        ...

    @property
    def place(self) -> Place:
        """Where the core is to lay out the source before the clock runs; as `self.feed` wants it, where that is one."""
        inner: Feed | None = getattr(self, "feed", None)
        return Place(self.device) if inner is None else getattr(inner, "place", Place(self.device))

    def bring(self, batch: Batch) -> Batch:
        """A copy of the caller's batch, delivered as `next` delivers its own: what equivalence is checked on."""
        return map_batch(lambda tensor: tensor.to(self.device, copy=True), batch)

    @property
    def queue(self) -> int:
        """How many batches may lie ready, made in the background. Timing must outlast them by far."""
        return 0

    @property
    def period(self) -> int | None:
        """After how many batches they come again, or their sizes do, where that is known."""
        return None

    def pause(self) -> None:
        """Leave nothing to do in the background, where it would disturb what is timed elsewhere."""
        return


class ResidentFeed(Feed):
    """Batches live on the device before the clock starts and are cycled: no transfer is part of the step."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.batches: Source = []
        self.position = 0

    def next(self) -> Batch:
        batch = self.batches[self.position]
        self.position = (self.position + 1) % len(self.batches)
        return batch

    @property
    def period(self) -> int | None:
        return len(self.batches)

    def reset(self, source: Source) -> None:
        self.batches, self.position = offered(source, self.place), 0
