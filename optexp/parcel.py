"""Tensors from one process to another through shared host memory: batches, outputs, gradients."""

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


class Outbox:
    """One process's outgoing shared memory. A parcel is valid until its sender's next one: memory is reused,
    because touching new pages costs more than the copy."""

    def __init__(self, folders: Sequence[str] = ()) -> None:
        """folders: where it may lie, the preferred one first; its owner removes them."""
        self._folders = folders or (tempfile.gettempdir(),)
        self._path: Path | None = None
        self._map: mmap.mmap | None = None
        self._size = 0

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
            _view(memory, entry).copy_(tensor.detach())
        return Parcel(str(self._path), placed)

    def _reserve(self, size: int) -> mmap.mmap:
        if self._map is None or size > self._size:
            self.close()
            descriptor, name = tempfile.mkstemp(prefix="optexp-", suffix=".parcel", dir=_roomy(self._folders, size))
            os.ftruncate(descriptor, size)
            self._path, self._map, self._size = Path(name), mmap.mmap(descriptor, size), size
            os.close(descriptor)
        return self._map

    def close(self) -> None:
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._path = self._map = None  # the mapping itself goes with the last tensor that views it


def receive(parcel: Parcel) -> Any:
    """The nest as CPU tensors over the shared pages, copied on write: a reader cannot change what others read."""
    with open(parcel.path, "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    return tree_map(lambda entry: _view(memory, entry), parcel.nest)


def _view(memory: mmap.mmap, entry: Entry) -> Tensor:
    count = prod(entry.shape)
    if count == 0:
        return torch.empty(entry.shape, dtype=entry.dtype)
    return torch.frombuffer(memory, dtype=entry.dtype, count=count, offset=entry.offset).view(entry.shape)


def _roomy(folders: Sequence[str], size: int) -> str:
    """The first folder with room to spare, else the last."""
    return next((folder for folder in folders if shutil.disk_usage(folder).free > 2 * size), folders[-1])
