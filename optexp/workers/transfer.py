"""Tensors from one process to another through a little shared memory: batches, outputs, gradients.

However large they are, they pass through the same few megabytes, piece by piece, on the device where both processes are
there, else on the host: pages of a host that a process touches for the first time cost several times what a copy does,
and as many of them as there are bytes would be most of the work.

Pages of the host are not registered with CUDA, though copies would run at twice the speed: on an H200 in a container,
results arrived wrong (and kernels failed with "resource already mapped") where each process had locked them.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from optexp.errors import Unshared
from optexp.support.reading import read
from optexp.support.sparse import assembled, coalesced, is_sparse, parts
from optexp.workers import cuda_ipc

PIECE = 2**25  # bytes
SENDERS = 4  # whose memory a receiver keeps in sight
_ALIGNMENT = 64


class Entry(Struct, frozen=True, tag=True):
    """Where one dense tensor lies among a transfer's bytes.

    offset: in bytes;  dtype: without "torch."
    """

    offset: int
    dtype: str
    shape: tuple[int, ...]


class Assembly(Struct, frozen=True, tag=True):
    """A sparse tensor, by the entries of the dense ones that it consists of."""

    layout: str
    shape: tuple[int, ...]
    entries: tuple[Entry, ...]
    coalesced: bool


Tensors = Mapping[str, Tensor] | Sequence[Tensor]


@dataclass(frozen=True)
class Transfer:
    """Tensors that are on their way, in a sequence or by name.

    file:    of shared memory on the host that the pieces pass through, or
    handle:  of memory on a device
    size:    of all tensors, in bytes
    entries: one for each tensor
    names:   of the entries, where the tensors are a mapping's
    """

    file: str
    handle: bytes
    size: int
    entries: tuple[Entry | Assembly, ...]
    names: tuple[str, ...] | None = None

    @property
    def place(self) -> str | bytes:
        return self.handle or self.file

    @property
    def pieces(self) -> int:
        return max(1, -(-self.size // PIECE))


class SharedMemory:
    """Shared memory, as one process sees it: one half is filled while the other is read."""

    size = 2 * PIECE

    def __init__(self, content: Tensor) -> None:
        self._bytes = content

    @classmethod
    def at(cls, place: str | bytes) -> SharedMemory:
        """Memory that another process has made; `Unshared` where this one cannot map it."""
        if isinstance(place, bytes):
            return cls(cuda_ipc.attach(place, cls.size))
        with open(place, "r+b") as file:
            return cls(torch.frombuffer(mmap.mmap(file.fileno(), cls.size), dtype=torch.uint8))

    def piece(self, index: int) -> Tensor:
        """Where a piece lies until the next but one takes its place."""
        return self._bytes.narrow(0, index % 2 * PIECE, PIECE)


class Outbox:
    """Tensors that one process sends: one transfer at a time, piece by piece on request."""

    def __init__(self, folders: Sequence[str] = (), on_device: bool = False) -> None:
        """folders: where memory of the host may lie, the preferred one first; its owner removes them.

        on_device: memory of the current CUDA device is used, where it can be shared
        """
        self._folders, self._on_device = folders or (tempfile.gettempdir(),), on_device
        self._place: str | bytes = ""
        self._memory: SharedMemory | None = None
        self._remove: weakref.finalize[[bool], Outbox] | None = None  # the file that another process may have open
        self._contents: list[tuple[int, Tensor]] = []  # bytes of every tensor, and where they begin
        self._transfer: Transfer | None = None

    def send(self, tensors: Tensors) -> Transfer:
        """Hold tensors, of any device, until they are copied: they must not change before that."""
        self._contents, size = [], 0

        def entry(tensor: Tensor) -> Entry:
            nonlocal size
            content = bytes_of(tensor)
            self._contents.append((size, content))
            made = Entry(size, _word(tensor.dtype), tuple(tensor.shape))
            size += -(-len(content) // _ALIGNMENT) * _ALIGNMENT
            return made

        def place(tensor: Tensor) -> Entry | Assembly:
            if not is_sparse(tensor):
                return entry(tensor)
            entries = tuple(map(entry, parts(tensor).values()))
            return Assembly(_word(tensor.layout), tuple(tensor.shape), entries, coalesced(tensor))

        named = isinstance(tensors, Mapping)
        entries = tuple(map(place, tensors.values() if isinstance(tensors, Mapping) else tensors))
        if self._memory is None:
            self._allocate()
        self._transfer = Transfer(*self._where, size, entries, tuple(map(str, tensors)) if named else None)
        return self._transfer

    def by_host(self) -> Transfer:
        """The same transfer, by a way that every process can see; before it is filled."""
        assert self._transfer is not None, "send comes first"
        self._close()
        self._on_device = False
        self._allocate()
        file, handle = self._where
        return replace(self._transfer, file=file, handle=handle)

    def fill(self, piece: int) -> None:
        """Copy a piece of the transfer into shared memory, and let go of the tensors that end in it."""
        assert self._memory is not None, "send comes first"
        start, stop, memory = piece * PIECE, (piece + 1) * PIECE, self._memory.piece(piece)
        for offset, content in self._contents:
            low, high = max(offset, start), min(offset + len(content), stop)
            if low < high:
                memory[low - start : high - start].copy_(content[low - offset : high - offset])
        if memory.is_cuda:
            torch.cuda.synchronize(memory.device)
        self._contents = [(offset, content) for offset, content in self._contents if offset + len(content) > stop]

    @property
    def _where(self) -> tuple[str, bytes]:
        """File and handle of the memory, one of which is empty."""
        return ("", self._place) if isinstance(self._place, bytes) else (self._place, b"")

    def empty(self) -> None:
        """Let go of what has not been copied."""
        self._contents, self._transfer = [], None

    def close(self) -> None:
        self._close()
        self.empty()

    def _allocate(self) -> None:
        if self._on_device:
            try:
                content, self._place = cuda_ipc.allocate(SharedMemory.size)
                self._memory = SharedMemory(content)
                return
            except Unshared:
                self._on_device = False
        self._place = _new_file(self._folders, SharedMemory.size)
        self._remove = weakref.finalize(self, Path(self._place).unlink, missing_ok=True)
        self._memory = SharedMemory.at(self._place)

    def _close(self) -> None:
        if self._remove is not None:
            self._remove()
        self._place, self._memory = "", None


class Inbox:
    """Tensors that one process receives from others.

    contents: of the transfer whose last piece was taken: a copy, in memory of its own
    """

    def __init__(self) -> None:
        self._seen: dict[str | bytes, SharedMemory] = {}
        self._transfer = Transfer("", b"", 0, ())
        self._arriving = torch.empty(0, dtype=torch.uint8)
        self.contents: Any = None

    def expect(self, transfer: Transfer, device: torch.device) -> None:
        """Make room for it on the device. `Unshared` where it must come by the host."""
        self.clear()
        memory = self._seen.pop(transfer.place, None) or SharedMemory.at(transfer.place)
        self._seen[transfer.place] = memory  # the last one used is the last one to go
        for forgotten in list(self._seen)[:-SENDERS]:
            del self._seen[forgotten]
        self._transfer, self._arriving = transfer, torch.empty(transfer.size, dtype=torch.uint8, device=device)

    def take(self, piece: int) -> None:
        """Copy a piece that its sender has filled to where all of the transfer goes."""
        room = self._arriving[piece * PIECE : (piece + 1) * PIECE]
        room.copy_(self._seen[self._transfer.place].piece(piece)[: len(room)])
        if room.is_cuda:
            torch.cuda.synchronize(room.device)
        if piece + 1 == self._transfer.pieces:
            tensors = tuple(_tensor_in(self._arriving, entry) for entry in self._transfer.entries)
            names = self._transfer.names
            self.contents = tensors if names is None else dict(zip(names, tensors, strict=True))

    @property
    def complete(self) -> bool:
        """Whether the last piece was taken."""
        return self.contents is not None

    def wipe(self) -> None:
        """Zeros in the shared memory that the transfer passed through: its contents are secret."""
        memory = self._seen[self._transfer.place]
        for half in range(min(2, self._transfer.pieces)):
            memory.piece(half)[: self._transfer.size].zero_()

    def clear(self) -> None:
        """Keep nothing."""
        self.contents, self._arriving = None, torch.empty(0, dtype=torch.uint8)


def bytes_of(tensor: Tensor) -> Tensor:
    """One after the other, without gaps; a copy only where it takes one."""
    tensor = read(tensor)
    if type(tensor) is not Tensor:  # a subclass may do anything; `copy_` asks it for its values
        tensor = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _tensor_in(content: Tensor, entry: Entry | Assembly) -> Tensor:
    if isinstance(entry, Assembly):
        pieces = [_tensor_in(content, part) for part in entry.entries]
        return assembled(getattr(torch, entry.layout), entry.shape, pieces, entry.coalesced)
    dtype: torch.dtype = getattr(torch, entry.dtype)
    return content.narrow(0, entry.offset, prod(entry.shape) * dtype.itemsize).view(dtype).view(entry.shape)


def _word(value: torch.dtype | torch.layout) -> str:
    return str(value).removeprefix("torch.")


def _new_file(folders: Sequence[str], size: int) -> str:
    """In the first folder with room to spare, else the last."""
    folder = next((folder for folder in folders if shutil.disk_usage(folder).free > 2 * size), folders[-1])
    descriptor, path = tempfile.mkstemp(prefix="optexp-", suffix=".transfer", dir=folder)
    os.ftruncate(descriptor, size)
    os.close(descriptor)
    return path
