"""Tensors from one process to another through shared host memory: batches, outputs, gradients."""

from __future__ import annotations

import mmap
import os
import shutil
import tempfile
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

_ALIGNMENT = 64


@dataclass(frozen=True)
class Parcel:
    """Where a nest of tensors lies: a file, each tensor's (offset, dtype, shape), and the nest's structure."""

    path: str
    entries: tuple[tuple[int, torch.dtype, tuple[int, ...]], ...]
    structure: pytree.TreeSpec


class Outbox:
    """One process's outgoing shared memory. A parcel is valid until its sender's next one: memory is reused,
    because touching new pages costs more than the copy."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._map: mmap.mmap | None = None
        self._size = 0

    def send(self, nest: Any) -> Parcel:
        """Copy the nest's tensors (from any device) into shared memory."""
        leaves, structure = pytree.tree_flatten(nest)
        entries, size = [], 0
        for leaf in leaves:
            entries.append((size, leaf.dtype, tuple(leaf.shape)))
            size += -(-leaf.numel() * leaf.element_size() // _ALIGNMENT) * _ALIGNMENT
        memory = self._reserve(max(size, _ALIGNMENT))
        for leaf, entry in zip(leaves, entries, strict=True):
            _view(memory, entry).copy_(leaf.detach())
        return Parcel(str(self._path), tuple(entries), structure)

    def _reserve(self, size: int) -> mmap.mmap:
        if self._map is None or size > self._size:
            self.close()
            descriptor, name = tempfile.mkstemp(prefix="optexp-", suffix=".parcel", dir=_folder(size))
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
    return pytree.tree_unflatten([_view(memory, entry) for entry in parcel.entries], parcel.structure)


def _view(memory: mmap.mmap, entry: tuple[int, torch.dtype, tuple[int, ...]]) -> Tensor:
    offset, dtype, shape = entry
    count = prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)


def _folder(size: int) -> str:
    """Shared memory where there is room for it, else the ordinary temporary folder."""
    shared = "/dev/shm"
    if os.path.isdir(shared) and shutil.disk_usage(shared).free > 2 * size:
        return shared
    return tempfile.gettempdir()
