"""How the next batch reaches the device."""

from __future__ import annotations

from typing import Protocol

import torch

from optexp.program.batches import Batch, Source, map_batch
from optexp.program.offered import Place, offered


class Feed(Protocol):
    """Brings the next batch to the device. The core owns the source of batches.

    Inherit from it: the defaults here fit feeds without work in the background.
    """

    device: torch.device

    def next(self) -> Batch:
        """The batch of the step that asks: the n-th since `reset` is `source[n % len(source)]`."""
        ...

    def reset(self, source: Source) -> None:
        """Start again from `source[0]`; drop prefetched batches.

        Keep the source, but take no batch from it here: take a batch when a step asks for it, or at most `queue` steps
        earlier. A batch taken earlier makes the verdict INVALID: results could be computed before the clock runs.
        """
        ...

    @property
    def place(self) -> Place:
        """Memory in which the core lays out the source before the clock runs; a wrapped `self.feed` decides it."""
        inner: Feed | None = getattr(self, "feed", None)
        return Place(self.device) if inner is None else getattr(inner, "place", Place(self.device))

    def bring(self, batch: Batch) -> Batch:
        """A copy of the caller's batch, delivered as `next` delivers its own; verification uses it."""
        return map_batch(lambda tensor: tensor.to(self.device, copy=True), batch)

    @property
    def queue(self) -> int:
        """Most batches made ahead in the background. Timed blocks must have many times as many steps."""
        return 0

    @property
    def period(self) -> int | None:
        """Number of batches after which they, or their sizes, repeat; None if unknown."""
        return None

    def pause(self) -> None:
        """Finish work in the background: it would disturb the timing of the other arm."""
        return


class ResidentFeed(Feed):
    """Batches that lie on the device before the clock starts and are cycled: no transfer is part of the step."""

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
