"""ARM: other places of a step's tensors in the card's memory, between the blocks of one process.

Steps that stream tensors larger than the L2 cache take up to a tenth longer in some places than in others. On an H200 a
transposed convolution with a GroupNorm takes 3.24 or 3.45 ms, and its fused form 2.65 or 2.88 ms, by what torch's
allocator did before. A process that stays in one place would measure a ratio of 1.13 to 1.30 by chance.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from optexp.measurement import clock
from optexp.program import Batch, map_batch, tensors_of
from optexp.support.card_memory import free_bytes, l2_bytes, shifts
from optexp.support.memory_plan import give_back
from optexp.workers.arm_program import nbytes
from optexp.workers.arm_timing import Timing

LONGEST_S = 0.1  # of one move without its steps: a process that takes longer stays in one place
IN_CACHES = 2.0  # sizes of the L2 cache: smaller memory is served by it, wherever it lies


class Placement(Timing):
    """Batches and intermediate results move; parameters stay, and so does memory that a graph has captured.

    It is enough if one arm moves: its pairs then meet the other's place, too, and the interval over pairs holds both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.shifts: list[Tensor] = []
        self.too_long = False

    def relocate(self) -> bool:
        """Whether a step's tensors lie in other places now, for all blocks until the next call.

        False where that makes no difference or takes too long: on a CPU, for memory that the L2 cache holds, where arms
        take turns on a full card, and where batches cannot be copied and take long to draw.
        """
        if self.too_long or self.in_turns or self._bytes() <= IN_CACHES * self._l2_bytes():
            return False
        begin = clock.now()
        self.program.feed.pause()
        clock.synchronize(self.device)
        self.shifts = []
        give_back(self.device)
        self.shifts = shifts(self.device, self.random)
        if not self.has_loader() and self._room():  # a loader makes its own, in memory that has been given back
            self.batches = copies(self.batches) or self.drawn_batches(self.distinct)
        self.restore()
        give_back(self.device)  # the batches before
        self.too_long = clock.now() - begin > LONGEST_S
        run = self.runner()
        for _ in range(self.workload.variety):  # which allocates intermediate results of each kind of batch
            run()
        self.program.feed.pause()
        clock.synchronize(self.device)
        return True

    def _room(self) -> bool:
        """Whether the card has room for the new batches beside the old ones, and for what drawing them takes."""
        return self.device.type != "cuda" or free_bytes(self.device) > 2 * sum(map(nbytes, self.batches))

    def _bytes(self) -> int:
        """Of the card's memory that torch holds for this process; 0 on a CPU."""
        return int(torch.cuda.memory_reserved(self.device)) if self.device.type == "cuda" else 0

    def _l2_bytes(self) -> int:
        return l2_bytes(self.device) if self.device.type == "cuda" else 0


def copies(batches: Sequence[Batch]) -> list[Batch]:
    """The same batches in other memory; empty where a copy would be laid out otherwise, as of an expanded tensor."""
    plain = all(_is_plain(tensor) for batch in batches for tensor in tensors_of(batch).values())
    return [map_batch(torch.clone, batch) for batch in batches] if plain else []


def _is_plain(tensor: Tensor) -> bool:
    """Whether a copy has the same layout. It would not be a leaf of a graph, and lies in no pinned memory."""
    if type(tensor) is not Tensor or tensor.requires_grad or tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return tensor.stride() == torch.empty_like(tensor, device="meta").stride() and not tensor.is_pinned()
