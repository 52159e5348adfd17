"""Prefetching: a side stream copies the next batch to the device while the current batch is computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from optexp.profiling.intervals import Union
from optexp.program import Batch, Feed, Program, Source
from optexp.program.feeds import nothing_copied, settings
from optexp.strategy import BITWISE, Contract, Counters, Evidence, Notes, Remedy, Stage, Strategy

if TYPE_CHECKING:
    from optexp.profiling.bounds import Bound
    from optexp.profiling.view import View
    from optexp.records.profile import Calibration
    from optexp.trace import Trace


@dataclass
class Prefetch(Strategy):
    """Double buffering: one batch on the device is in use, another is being copied. Needs non-blocking copies."""

    stage = Stage.FEED  # after pinned_memory, by name

    @property
    def contract(self) -> Contract:
        return BITWISE

    @property
    def remedies(self) -> tuple[Remedy, ...]:
        return (Remedy("memory_copy"),)

    def bound(self, view: View, ceilings: Calibration | None) -> Bound | None:
        """Copies to the device are hidden behind kernels."""
        step = view.parts(ceilings)
        if not step.on_gpu:
            return None
        exposed = step.copied_us("HtoD")
        queued = step.breakdown.us("launch_gap") + step.breakdown.us("other")
        text = f"copies to the device are hidden behind kernels, which take {step.share(exposed)}"
        return step.less(text, device=exposed, waiting=queued)

    def unsupported_on(self, device: torch.device) -> str | None:
        return nothing_copied(device)

    def unsupported(self, program: Program, device: torch.device) -> str | None:
        if reason := self.unsupported_on(device):
            return reason
        feed = settings(program.feed)
        if "non_blocking" not in feed:
            return "batches lie on the device before the step begins, and nothing is left to prefetch: leave it out"
        if not feed.get("delivers", True):
            return "the step copies its batch itself, piece by piece: use streams, which overlaps these copies"
        if not (feed["non_blocking"] and feed.get("pin_memory", True)):
            return "copies from pageable memory make the host wait, and nothing can overlap: add pinned_memory"
        return None

    def apply(self, program: Program) -> tuple[Program, Notes]:
        return replace(program, feed=Prefetched(program.feed)), {}

    def evidence(self, before: Trace, after: Trace, notes: Notes, counters: Counters) -> Evidence:
        """Engaged if copies run on a stream of their own; whether kernels overlap with them depends on the step."""
        copies = [copy for copy in after.copies if copy.kind == "HtoD"]
        if not copies:
            return Evidence(False, "the profiled steps copied nothing to the device")
        ((computing, _),) = Counter(kernel.stream for kernel in after.kernels).most_common(1) or [(None, 0)]
        aside = [copy for copy in copies if copy.stream != computing]
        if not aside:
            return Evidence(False, "batches are copied on the stream that computes")
        busy = Union(kernel.interval for kernel in after.kernels)
        share = sum(busy.within(*copy.interval) for copy in aside) / sum(copy.duration for copy in aside)
        text = f"batches are copied on a stream of their own; kernels run during {share:.0%} of that time"
        if not round(share, 2):
            text += ": the device waits for the host (add cuda_graph, or strategy.pinned_memory.workers)"
        return Evidence(True, text)

    def recipe(self, notes: Notes) -> str:
        return "batches = prefetched(batches, device)"


class Prefetched(Feed):
    """Wraps another feed and takes its batches one step ahead.

    A batch's memory belongs to the side stream, which waits for all earlier work of the step's stream before it
    allocates. So memory that was freed by then is no longer in use, and no tensor needs `record_stream`, which would
    hold memory for as long as the host runs ahead. Page-locked memory is not reused during a copy either: its allocator
    waits for the stream of each non-blocking copy.
    """

    def __init__(self, feed: Feed) -> None:
        self.feed, self.device = feed, feed.device
        self.side = torch.cuda.Stream(feed.device)
        self.ready: Batch | None = None

    @property
    def batches(self) -> Source:
        batches: Source = getattr(self.feed, "batches", [])
        return batches

    @property
    def period(self) -> int | None:
        return self.feed.period

    @property
    def queue(self) -> int:
        return self.feed.queue + 1

    def next(self) -> Batch:
        batch = self._aside(self.feed.next) if self.ready is None else self.ready
        torch.cuda.current_stream(self.device).wait_stream(self.side)
        self.ready = self._aside(self.feed.next)
        return batch

    def bring(self, batch: Batch) -> Batch:
        brought = self._aside(lambda: self.feed.bring(batch))
        torch.cuda.current_stream(self.device).wait_stream(self.side)
        return brought

    def reset(self, source: Source) -> None:
        self.ready = None
        self.feed.reset(source)

    def pause(self) -> None:
        self.ready = None
        self.feed.pause()

    def _aside(self, fetch: Callable[[], Batch]) -> Batch:
        self.side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.side):
            return fetch()


def prefetched(batches: Iterator[tuple[Tensor, ...]], device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """The batches, each copied on a side stream while the previous batch is computed."""
    side, ready = torch.cuda.Stream(device), None
    while True:
        here = torch.cuda.current_stream(device)
        here.wait_stream(side)
        batch = ready
        side.wait_stream(here)  # so that memory freed by earlier steps is no longer in use when it is filled anew
        with torch.cuda.stream(side):
            ready = next(batches)
        if batch is not None:
            yield batch
