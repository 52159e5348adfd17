"""Memory that belongs to several elements, of one tensor or of two: to write to one writes to the other."""

from __future__ import annotations

import torch
from torch import Tensor

from optexp.support import sparse

MOST = 2**26  # elements of a storage that are marked


def overlaps_itself(tensor: Tensor) -> bool:
    """Whether several elements lie in one place, as after `expand`."""
    values = next(iter(sparse.parts(tensor).values()))
    return any(size > 1 and not stride for size, stride in zip(values.shape, values.stride(), strict=True))


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether some memory belongs to both of two tensors in one storage; columns of one tensor have none in common.

    Of very large tensors, whose elements would take long to mark, it is said where their ranges meet.
    """
    ours, theirs = (next(iter(sparse.parts(tensor).values())) for tensor in (one, other))
    if not ours.numel() or not theirs.numel():
        return False
    (first, last), (begin, end) = _range(ours), _range(theirs)
    if last <= begin or end <= first:
        return False
    unit = min(ours.element_size(), theirs.element_size())
    if (size := max(last, end) // unit) > MOST:
        return True
    marks = torch.zeros(size, dtype=torch.bool)
    _elements(marks, ours, unit).fill_(True)
    return bool(_elements(marks, theirs, unit).any())


def _range(tensor: Tensor) -> tuple[int, int]:
    """Its first byte in its storage, and the first one behind it."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first, width = tensor.storage_offset(), tensor.element_size()
    return int(first * width), int((first + reach + 1) * width)


def _elements(marks: Tensor, tensor: Tensor, unit: int) -> Tensor:
    """The marks of a tensor's elements, each of `unit` bytes."""
    width = tensor.element_size() // unit
    shape = [size if stride else 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return marks.as_strided(
        [*shape, width], [*(stride * width for stride in tensor.stride()), 1], tensor.storage_offset() * width
    )
