"""Tensors from one process to another through shared host memory: batches, outputs, gradients.

The pages are not registered with CUDA, though copies would run at twice the speed: on an H200 in a container, results
arrived wrong (and kernels failed with "resource already mapped") where each process had locked them.
"""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_ALIGNMENT = 64


@dataclass(frozen=True)
class Entry:
    """Where one tensor lies in the file."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Parcel:
    """A nest of tensors in a file of shared memory: the same nest, with an `Entry` for each tensor."""

    path: str
    nest: Any


class Memory:
    """A file of shared memory, as one process sees it."""

    def __init__(self, descriptor: int, size: int) -> None:
        self.map, self.size = mmap.mmap(descriptor, size), size

    def view(self, entry: Entry) -> Tensor:
        count = prod(entry.shape)
        if count == 0:
            return torch.empty(entry.shape, dtype=entry.dtype)
        return torch.frombuffer(self.map, dtype=entry.dtype, count=count, offset=entry.offset).view(entry.shape)


class Outbox:
    """One process's outgoing shared memory. A parcel is valid until its sender's next one: memory is reused,
    because touching new pages costs more than the copy."""

    def __init__(self, folders: Sequence[str] = ()) -> None:
        """folders: where it may lie, the preferred one first; its owner removes them."""
        self._folders = folders or (tempfile.gettempdir(),)
        self._path: Path | None = None
        self._memory: Memory | None = None

    def send(self, nest: Any) -> Parcel:
        """Copy the nest's tensors (from any device) into shared memory."""
        tensors: list[Tensor] = []
        entries: list[Entry] = []
        size = 0

        def place(tensor: Tensor) -> Entry:
            nonlocal size
            tensors.append(tensor)
            entries.append(Entry(size, tensor.dtype, tuple(tensor.shape)))
            size += -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT
            return entries[-1]

        placed = tree_map(place, nest)
        memory = self._reserve(max(size, _ALIGNMENT))
        for tensor, entry in zip(tensors, entries, strict=True):
            memory.view(entry).copy_(tensor.detach())
        return Parcel(str(self._path), placed)

    def _reserve(self, size: int) -> Memory:
        if self._memory is None or size > self._memory.size:
            self.close()
            descriptor, name = tempfile.mkstemp(prefix="optexp-", suffix=".parcel", dir=_roomy(self._folders, size))
            os.ftruncate(descriptor, size)
            self._path, self._memory = Path(name), Memory(descriptor, size)
            os.close(descriptor)
        return self._memory

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._path = self._memory = None


class Inbox:
    """What one process reads from others; files are kept open for as long as they exist."""

    def __init__(self) -> None:
        self._files: dict[str, Memory] = {}

    def receive(self, parcel: Parcel) -> Any:
        """The nest as CPU tensors over the shared pages: to be read at once, and not to be written to."""
        if parcel.path not in self._files:
            for path in [path for path in self._files if not os.path.exists(path)]:
                del self._files[path]
            with open(parcel.path, "r+b") as file:
                self._files[parcel.path] = Memory(file.fileno(), os.fstat(file.fileno()).st_size)
        return tree_map(self._files[parcel.path].view, parcel.nest)


def _roomy(folders: Sequence[str], size: int) -> str:
    """The first folder with room to spare, else the last."""
    return next((folder for folder in folders if shutil.disk_usage(folder).free > 2 * size), folders[-1])
