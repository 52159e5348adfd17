"""Tensors from one process to another through a little shared host memory: batches, outputs, gradients.

However large they are, they pass through the same few megabytes, piece by piece: pages that a process touches for the
first time cost several times what a copy does, and as many of them as there are bytes would be most of the work.

The pages are not registered with CUDA, though copies would run at twice the speed: on an H200 in a container, results
arrived wrong (and kernels failed with "resource already mapped") where each process had locked them. On their way to a
device they pass through locked memory of the receiver's own.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

PIECE = 2**25  # bytes
STAGE = 2**22  # of locked memory, twice: one part is filled while the other is on its way
_ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies among a parcel's bytes."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parcel:
    """A nest of tensors that is on its way: the same nest, with an `Entry` for each tensor.

    path:  of the shared memory that the pieces pass through
    size:  of all tensors, in bytes
    """

    path: str
    size: int
    nest: Any

    @property
    def pieces(self) -> int:
        return max(1, -(-self.size // PIECE))


class Memory:
    """A file of shared memory, as one process sees it: one half is filled while the other is read."""

    size = 2 * PIECE

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._bytes = torch.frombuffer(mmap.mmap(file.fileno(), self.size), dtype=torch.uint8)

    def piece(self, index: int) -> Tensor:
        """Where a piece lies until the next but one takes its place."""
        return self._bytes.narrow(0, index % 2 * PIECE, PIECE)


class Outbox:
    """What one process sends: a parcel at a time, piece by piece as it is asked for."""

    def __init__(self, folders: Sequence[str] = ()) -> None:
        """folders: where the shared memory may lie, the preferred one first; its owner removes them."""
        self._folders = folders or (tempfile.gettempdir(),)
        self._path = ""
        self._memory: Memory | None = None
        self._contents: list[tuple[int, Tensor]] = []  # bytes of every tensor, and where they begin

    def send(self, nest: Any) -> Parcel:
        """Hold the nest's tensors, of any device, until they are copied: they must not change before that."""
        self._contents, size = [], 0

        def place(tensor: Tensor) -> Entry:
            nonlocal size
            content = _bytes_of(tensor)
            self._contents.append((size, content))
            entry = Entry(size, tensor.dtype, tuple(tensor.shape))
            size += -(-len(content) // _ALIGNMENT) * _ALIGNMENT
            return entry

        placed = tree_map(place, nest)
        if self._memory is None:
            self._path = _new_file(self._folders, Memory.size)
            self._memory = Memory(self._path)
        return Parcel(self._path, size, placed)

    def fill(self, piece: int) -> None:
        """Copy a piece of the parcel into shared memory, and let go of the tensors that end in it."""
        assert self._memory is not None, "send comes first"
        start, stop, memory = piece * PIECE, (piece + 1) * PIECE, self._memory.piece(piece)
        for offset, content in self._contents:
            low, high = max(offset, start), min(offset + len(content), stop)
            if low < high:
                memory[low - start : high - start].copy_(content[low - offset : high - offset])
        self._contents = [(offset, content) for offset, content in self._contents if offset + len(content) > stop]

    def close(self) -> None:
        Path(self._path).unlink(missing_ok=True)
        self._path, self._memory, self._contents = "", None, []


class Stage:
    """A little locked memory, from which copies to a device need not be waited for."""

    def __init__(self) -> None:
        self._bytes = torch.empty(STAGE, dtype=torch.uint8, pin_memory=True)
        self.left = torch.cuda.Event()

    def copy(self, here: Tensor, there: Tensor) -> None:
        self.left.synchronize()  # what it held before
        part = self._bytes[: len(here)].copy_(here)
        there.copy_(part, non_blocking=True)
        self.left.record()


class Inbox:
    """What one process receives from others.

    contents: of the parcel whose last piece was taken: a copy, in memory of its own
    """

    def __init__(self) -> None:
        self._files: dict[str, Memory] = {}
        self._arriving = torch.empty(0, dtype=torch.uint8)
        self._stages: list[Stage] = []
        self.contents: Any = None

    def take(self, parcel: Parcel, piece: int, device: torch.device) -> None:
        """Copy a piece that its sender has filled to where all of the parcel goes."""
        if piece == 0:
            self.clear()
            self._arriving = torch.empty(parcel.size, dtype=torch.uint8, device=device)
        if parcel.path not in self._files:
            self._files[parcel.path] = Memory(parcel.path)
        room = self._arriving[piece * PIECE : (piece + 1) * PIECE]
        self._copy(self._files[parcel.path].piece(piece)[: len(room)], room)
        if piece + 1 == parcel.pieces:
            self.contents = tree_map(partial(_tensor_in, self._arriving), parcel.nest)

    def _copy(self, here: Tensor, there: Tensor) -> None:
        if there.device.type != "cuda":
            there.copy_(here)
            return
        self._stages = self._stages or [Stage(), Stage()]
        for index, (part, room) in enumerate(zip(here.split(STAGE), there.split(STAGE), strict=True)):
            self._stages[index % 2].copy(part, room)
        for stage in self._stages:
            stage.left.synchronize()

    def clear(self) -> None:
        """Keep nothing."""
        self.contents, self._arriving = None, torch.empty(0, dtype=torch.uint8)


def _bytes_of(tensor: Tensor) -> Tensor:
    """One after the other, without gaps; a copy only where it takes one."""
    tensor = tensor.detach()
    if type(tensor) is not Tensor:  # a subclass may do anything; `copy_` asks it for its values
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _tensor_in(content: Tensor, entry: Entry) -> Tensor:
    size = prod(entry.shape) * entry.dtype.itemsize
    return content.narrow(0, entry.offset, size).view(entry.dtype).view(entry.shape)


def _new_file(folders: Sequence[str], size: int) -> str:
    """In the first folder with room to spare, else the last."""
    folder = next((folder for folder in folders if shutil.disk_usage(folder).free > 2 * size), folders[-1])
    descriptor, path = tempfile.mkstemp(prefix="optexp-", suffix=".parcel", dir=folder)
    os.ftruncate(descriptor, size)
    os.close(descriptor)
    return path
