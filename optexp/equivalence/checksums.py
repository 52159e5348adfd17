"""64 bits in the place of a tensor's contents: whether two of them are equal can be told without holding both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from optexp.equivalence.tensor_math import chunks

LARGE = 2**26  # bytes: smaller tensors are held as they are
_PLACE, _MIX, _FINAL = -7046029254386353131, -4658895280553007687, -7723592293110705685  # odd, as splitmix64 has them
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def checksum(tensor: Tensor) -> int:
    """Of every bit and its place. Unequal contents have the same one by chance, once in 2^64.

    Sums of integers wrap around, so that the order in which a device adds them does not matter.
    """
    sums, place = list[Tensor](), 0
    for _, (part,) in chunks(tensor):
        for words in _words(part):
            at = torch.arange(place, place + len(words), device=words.device)
            mixed = at.mul_(_PLACE).bitwise_xor_(words).mul_(_MIX)
            mixed = mixed.bitwise_xor_(mixed >> 29).mul_(_FINAL)
            sums.append(mixed.bitwise_xor_(mixed >> 32).sum())
            place += len(words)
    return int(torch.stack(sums).sum()) % 2**64 if sums else 0  # one wait for all of them


def _words(part: Tensor) -> Iterator[Tensor]:
    """A vector's bits as integers of eight bytes, and a rest of fewer than eight bytes as one for each element."""
    size = part.element_size()
    whole = len(part) * size // 8 * (8 // size)
    if whole:
        body = part[:whole]
        yield (body.clone() if body.storage_offset() * size % 8 else body).view(torch.int64)
    if whole < len(part):
        yield part[whole:].view(_INTEGERS[size]).to(torch.int64)


def compact(tensors: Mapping[str, Tensor], copy: bool = False) -> dict[str, Tensor]:
    """The same names; each tensor of more than `LARGE` bytes is replaced by its checksum, shape and dtype.

    copy: of the others, copies
    """
    return {name: _compact(tensor.detach(), copy) for name, tensor in tensors.items()}


def _compact(tensor: Tensor, copy: bool) -> Tensor:
    if tensor.layout is not torch.strided or tensor.nbytes <= LARGE:
        return tensor.clone() if copy else tensor
    value = checksum(tensor)
    kind = sum(ord(letter) << 8 * place for place, letter in enumerate(str(tensor.dtype)[6:13]))
    return torch.tensor([value >> 32, value & 0xFFFFFFFF, kind, *tensor.shape], dtype=torch.int64)
