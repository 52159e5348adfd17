"""The source of a feed's batches: the core lays them out in memory, and the feed takes one when a step asks for it.

A feed with a whole block of batches could compute all their results in one call, before the clock runs or in a block's
first step. So a feed only names the place of the batches (`Place`), and `Offered` notes how early it takes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor

from optexp.program.batches import tensors_of

if TYPE_CHECKING:
    from optexp.program import Batch, Source


@dataclass(frozen=True)
class Place:
    """Where batches lie before a feed takes them.

    Args:
        device: Device of the memory.
        pinned: Page-locked host memory, which a GPU reads by itself.
        copied: Copies of the batches, so that later changes of the source do not reach them.
        images_last: Images (4 dimensions) in the memory format channels-last.
    """

    device: torch.device
    pinned: bool = False
    copied: bool = False
    images_last: bool = False

    def put(self, tensor: Tensor) -> Tensor:
        tensor = tensor.to(self.device, copy=self.copied)
        if self.images_last and tensor.dim() == 4:
            tensor = tensor.contiguous(memory_format=torch.channels_last)
        return tensor.pin_memory() if self.pinned else tensor


class Offered(Sequence["Batch"]):
    """A cycle of batches that records how far ahead of the steps its batches are taken.

    due:    number of steps that have asked for a batch since the cycle began
    ahead:  most steps by which a batch was taken before its own step; -1 if none was taken
    first:  index of the batch that the cycle began with
    """

    def __init__(self, batches: Source, place: Place) -> None:
        self.place = place
        self.lay_out(batches)
        self.begin()

    def lay_out(self, batches: Source) -> None:
        """Replace the batches; the position in the cycle stays."""
        self._batches = [self._put(batch) for batch in batches]
        self._count, self._versions = len(self._batches), self._tensor_versions()

    def refill(self, batches: Source, into: Callable[[Batch, Batch], Batch]) -> list[Batch]:
        """Replace each batch by `into(old, new)`, and return the new ones; the position in the cycle stays."""
        self._batches = [into(old, self._put(new)) for old, new in zip(self._batches, batches, strict=True)]
        self._versions = self._tensor_versions()
        return list(self._batches)

    def exchange(self, other: Offered) -> None:
        """Swap batches with another cycle."""
        self._batches, other._batches = other._batches, self._batches
        self._versions, other._versions = other._versions, self._versions

    @property
    def written(self) -> bool:
        """Whether a step has written to a batch that lies here."""
        return self._tensor_versions() != self._versions

    def _tensor_versions(self) -> list[int]:
        """The version of each tensor, which torch raises at each write; tensors of inference mode have none."""
        tensors = (tensor for batch in self._batches for tensor in tensors_of(batch).values())
        return [tensor._version for tensor in tensors if not tensor.is_inference()]

    def begin(self, first: int = 0) -> None:
        """Start the cycle again at batch `first`."""
        self.first, self.due, self.ahead = first % max(1, self._count), 0, -1

    @property
    def current(self) -> Batch:
        """The batch of the last step."""
        return self._batches[(self.due - 1 + self.first) % self._count]

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Batch: ...

    @overload
    def __getitem__(self, index: slice) -> list[Batch]: ...

    def __getitem__(self, index: Any) -> Any:
        """The batch at an index of the cycle, or the batches of a slice; notes how early it is taken."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if index < 0:
            index += self._count
        if not 0 <= index < self._count:
            raise IndexError(index)
        ahead = index - (self.due - 1)  # the present step's own batch has the index due - 1
        if self.due:
            ahead %= self._count  # a batch of an earlier step is taken for the next round of the cycle
        if ahead > self.ahead:
            self.ahead = ahead
        return self._batches[(index + self.first) % self._count]

    def __setitem__(self, index: int, batch: Batch) -> None:
        self._batches[(index + self.first) % self._count] = self._put(batch)
        self._versions = self._tensor_versions()

    def _put(self, batch: Batch) -> Batch:
        if isinstance(batch, Mapping):
            return {name: self.place.put(tensor) for name, tensor in batch.items()}
        return tuple(self.place.put(tensor) for tensor in batch)


def offered(source: Source, place: Place) -> Offered:
    """The source itself if the core has laid it out at `place`, else its batches laid out there."""
    return source if isinstance(source, Offered) and source.place == place else Offered(source, place)
