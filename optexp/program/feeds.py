"""How batches reach the device when moving or making them is part of the work: from host memory, or a DataLoader."""

from __future__ import annotations

import os
import pickle
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import numpy
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler
from torch.utils.data._utils.fetch import _MapDatasetFetcher

from optexp.program import Batch, Feed, Source, map_batch
from optexp.program.offered import Offered, Place, offered
from optexp.support.random_state import seed_all, state_of

SHORT_EPOCH = 100  # batches: in a longer epoch, a smaller last batch moves the mean by less than a percent


@dataclass
class HostFeed(Feed):
    """Batches lie in host memory; each is copied to the device when a step asks for it, or by the step itself.

    pin_memory:    page-locked memory, which the device reads without the CPU's help
    non_blocking:  do not wait for the copy (from pageable memory, CUDA waits all the same)
    delivers:      False leaves batches on the host: the step copies them, piece by piece
    """

    device: torch.device
    pin_memory: bool = False
    non_blocking: bool = False
    delivers: bool = True

    def __post_init__(self) -> None:
        self.batches = Offered([], self.place)
        self.position = 0
        self._source: Source | None = None

    def next(self) -> Batch:
        batch = self.batches[self.position]
        self.position = (self.position + 1) % len(self.batches)
        return self._deliver(batch)

    @property
    def period(self) -> int | None:
        return len(self.batches)

    def reset(self, source: Source) -> None:
        if source is not self._source:  # pinning takes long
            self.batches, self._source = offered(source, self.place), source
        self.position = 0

    @property
    def place(self) -> Place:
        pinned = self.pin_memory and self.device.type == "cuda"
        return Place(torch.device("cpu"), pinned=pinned, copied=True)

    def bring(self, batch: Batch) -> Batch:
        return self._deliver(map_batch(self._on_host, batch))

    def _on_host(self, tensor: Tensor) -> Tensor:
        return on_host(tensor, self.device, self.pin_memory)

    def _deliver(self, batch: Batch) -> Batch:
        if not self.delivers:
            return batch
        return map_batch(lambda tensor: tensor.to(self.device, non_blocking=self.non_blocking), batch)


def generators(loader: DataLoader[Any]) -> list[Callable[[], object]]:
    """Functions that restore the present states of a loader's own random number generators."""
    parts = (
        loader,
        loader.dataset,
        loader.sampler,
        loader.batch_sampler,
        getattr(loader.batch_sampler, "sampler", None),
    )
    own = {id(value): value for part in parts for value in getattr(part, "__dict__", {}).values()}
    states = [state for value in own.values() if (state := state_of(value))]
    return [partial(put_back, read()) for read, put_back in states]


@dataclass
class LoaderFeed(Feed):
    """A DataLoader's batches, epoch after epoch without end; each is copied to the device.

    Making batches is part of the work, so the core's batches are not used; equal seeds give both arms equal batches.
    Settings that are None are the loader's. `dataclasses.replace` changes settings; data set and sampling stay.

    dtype:         of floating-point tensors on the device; None: unchanged
    workers:       processes that make batches; 0 makes them in the step
    prefetch:      batches that each worker makes ahead
    pin_memory:    a thread copies each batch to page-locked memory
    non_blocking:  do not wait for the copy to the device
    begin_again:   functions that restore the random number generators of loader, samplers and data set
    """

    loader: DataLoader[Any]
    device: torch.device
    dtype: torch.dtype | None = None
    workers: int | None = None
    prefetch: int | None = None
    pin_memory: bool | None = None
    non_blocking: bool = False
    cores: set[int] = field(default_factory=lambda: os.sched_getaffinity(0))  # of the arm before it is bound to fewer
    begin_again: list[Callable[[], object]] | None = None

    def __post_init__(self) -> None:
        self.workers = self.loader.num_workers if self.workers is None else self.workers
        self.prefetch = self.loader.prefetch_factor or 2 if self.prefetch is None else self.prefetch
        self.pin_memory = self.loader.pin_memory if self.pin_memory is None else self.pin_memory
        self.begin_again = generators(self.loader) if self.begin_again is None else self.begin_again
        self._endless: _Endless | None = None
        self._running: DataLoader[Any] | None = None
        self._bound_to: set[int] = set()
        self._batches: Iterator[Any] | None = None

    @property
    def queue(self) -> int:
        return (self.workers or 0) * (self.prefetch or 0)

    @property
    def period(self) -> int | None:
        """The length of an epoch, if its last batch is smaller and it is at most SHORT_EPOCH; else None."""
        loader = self.loader
        if loader.drop_last or not loader.batch_size or isinstance(loader.dataset, IterableDataset):
            return None
        try:
            examples = len(loader.sampler)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # a sampler without a length
            return None
        epoch = -(-examples // loader.batch_size)
        return epoch if epoch <= SHORT_EPOCH and examples % loader.batch_size else None

    def next(self) -> Batch:
        if self._batches is None:
            self._start()
        try:
            made = next(self._batches)  # type: ignore[arg-type]
        except StopIteration:  # an iterable data set ended
            self._start()
            made = next(self._batches, None)  # type: ignore[arg-type]
            if made is None:
                raise ValueError("the data loader gives no batch") from None
        return map_batch(self._to_device, as_batch(made))

    def reset(self, source: Source) -> None:
        self.pause()
        for put_back in self.begin_again or ():
            put_back()

    def bring(self, batch: Batch) -> Batch:
        pinned = bool(self.pin_memory)
        return map_batch(lambda tensor: self._to_device(on_host(tensor, self.device, pinned)), batch)

    def picked(self, positions: Collection[int], limit_s: float) -> Iterator[tuple[int, Batch]]:
        """Single batches of the epochs after a reset, made in this process; nothing for an iterable data set.

        positions: positions of the batches, which go on behind the end of an epoch
        limit_s:   seconds after which the sampler is asked for no more indices
        """
        loader, last, chosen = self.loader, max(positions, default=-1), dict[int, Any]()
        if isinstance(loader.dataset, IterableDataset):
            return
        end, batched = time.monotonic() + limit_s, loader.batch_sampler is not None
        for position, indices in enumerate(self._indices()):
            if position in positions:
                chosen[position] = indices
            if position >= last or time.monotonic() > end:
                break
        fetch = _MapDatasetFetcher(loader.dataset, batched, loader.collate_fn, loader.drop_last).fetch
        for position, indices in chosen.items():
            seed_all(position)  # for data sets that draw random numbers
            yield position, map_batch(self._to_device, as_batch(fetch(indices)))

    def _indices(self) -> Iterator[Any]:
        """The sampler's indices for each batch, in one epoch after the other, as this feed does; ends with an epoch of
        none."""
        loader, empty = self.loader, False
        if loader.generator is not None:  # a loader draws its seed from it before its sampler starts
            torch.empty((), dtype=torch.int64).random_(generator=loader.generator)
        while not empty:
            empty = True
            for indices in loader.sampler if loader.batch_sampler is None else loader.batch_sampler:
                empty = False
                yield indices

    def pause(self) -> None:
        """Take and drop the batches that workers are still making; the idle workers can then resume quickly."""
        if self._batches is not None and self._endless is not None:
            self._endless.stopped = True
            for _ in self._batches:
                pass
        elif self._batches is not None:
            self._running = None  # an iterable data set cannot be stopped, so its workers end
        self._batches = None

    def _start(self) -> None:
        cores = os.sched_getaffinity(0)
        if self._running is None or cores != self._bound_to:
            self._running, self._bound_to = self._build(), cores
        if self._endless is not None:
            self._endless.begin()
        # Workers and the pinning thread inherit the cores of the thread that starts them: they get the cores to which
        # the timed loop is not bound.
        with _moved_to(self.cores - cores):
            self._batches = iter(self._running)

    def _build(self) -> DataLoader[Any]:
        """The user's loader again, with this feed's settings; its epochs never end, unless its data set is iterable."""
        loader = self.loader
        options = self._worker_options() if self.workers else {}
        if isinstance(loader.dataset, IterableDataset):
            options |= {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
        elif loader.batch_sampler is not None:
            self._endless = _Endless(loader.batch_sampler)
            options |= {"batch_sampler": self._endless}
        else:  # the data set makes whole batches
            self._endless = _Endless(loader.sampler)
            options |= {"batch_size": None, "sampler": self._endless}
        return DataLoader(
            loader.dataset,
            num_workers=self.workers or 0,
            collate_fn=loader.collate_fn,
            pin_memory=bool(self.pin_memory) and self.device.type == "cuda",
            worker_init_fn=loader.worker_init_fn,
            generator=loader.generator,
            **options,
        )

    def _worker_options(self) -> dict[str, Any]:
        loader = self.loader
        # Persistent workers continue their sequences of random numbers, so a data set that draws gets new workers.
        persistent = isinstance(loader.dataset, IterableDataset) or not draws(loader)
        return {
            "prefetch_factor": self.prefetch,
            "persistent_workers": persistent,
            "timeout": loader.timeout,
            "multiprocessing_context": loader.multiprocessing_context,
        }

    def _to_device(self, tensor: Tensor) -> Tensor:
        moved = tensor.to(self.device, non_blocking=self.non_blocking)
        return moved.to(self.dtype) if self.dtype is not None and moved.is_floating_point() else moved


def settings(part: object) -> dict[str, Any]:
    """Settings of a feed or a step by name; empty for one that is no dataclass.

    A feed or step that copies batches to the device is a dataclass with the fields `pin_memory` or `non_blocking`, and
    `dataclasses.replace` changes them. Without these fields it copies nothing.
    """
    if not is_dataclass(part):
        return {}
    return {f.name: getattr(part, f.name) for f in fields(part)}


def nothing_copied(device: torch.device) -> str | None:
    """The reason why no batch is copied to this device; None where some may be."""
    if device.type == "cuda":
        return None
    return (
        f"batches are used where they are made, on the {device.type.upper()}, and nothing is copied:"
        " use device=cuda on a machine with an NVIDIA GPU"
    )


def on_host(tensor: Tensor, device: torch.device, pinned: bool) -> Tensor:
    """A copy in host memory.

    Args:
        tensor: A tensor on any device.
        device: Device of the step.
        pinned: Use page-locked memory if `device` is a GPU.
    """
    copy = tensor.to("cpu", copy=True)
    return copy.pin_memory() if pinned and device.type == "cuda" else copy


class _Endless(Sampler[Any]):
    """A sampler repeated until `stopped` is set; workers then finish only the batches already requested."""

    def __init__(self, epoch: Iterable[Any]) -> None:
        self.epoch, self.stopped = epoch, False
        self.random_state = torch.get_rng_state()

    def begin(self) -> None:
        """Start again. A loader's own draws depend on its workers, so samplers use the random state before them."""
        self.stopped, self.random_state = False, torch.get_rng_state()

    def __iter__(self) -> Iterator[Any]:
        torch.set_rng_state(self.random_state)
        while True:
            empty = True
            for indices in self.epoch:
                if self.stopped:
                    return
                empty = False
                yield indices
            if empty:
                raise ValueError("the data loader gives no batch: is the data set smaller than one?")


def draws(loader: DataLoader[Any]) -> bool:
    """Whether a data set draws random numbers while it makes an item, as augmentation does. Reads the first item."""

    def state() -> tuple[Any, ...]:
        return random.getstate(), pickle.dumps(numpy.random.get_state()), torch.get_rng_state().tolist()

    kept, before = (random.getstate(), numpy.random.get_state(), torch.get_rng_state()), state()
    try:
        loader.dataset[0]
        return state() != before
    except Exception:  # there is no item 0, or the loader will meet the same error
        return False
    finally:
        random.setstate(kept[0])
        numpy.random.set_state(kept[1])
        torch.set_rng_state(kept[2])


def as_batch(item: Any) -> Batch:
    """A loader's item as a batch: tensors in a tuple, or by name.

    Raises:
        TypeError: the item holds anything else.
    """
    batch: Any = (item,) if isinstance(item, Tensor) else item
    if isinstance(batch, list):
        batch = tuple(batch)
    values = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, (tuple, Mapping)) or not all(isinstance(value, Tensor) for value in values):
        raise TypeError(f"the data loader yields {_shape_of(item)}; a batch is tensors, in a tuple or by name")
    return batch


def _shape_of(item: Any) -> str:
    if isinstance(item, Mapping):
        return f"a mapping with {', '.join(f'{key}: {type(value).__name__}' for key, value in item.items())}"
    if isinstance(item, (list, tuple)):
        return f"a {type(item).__name__} of {', '.join(type(value).__name__ for value in item)}"
    return f"a {type(item).__name__}"


@contextmanager
def _moved_to(cores: set[int]) -> Iterator[None]:
    """Bind this thread to `cores` inside the block, for threads and workers that it starts; empty: no change."""
    before = os.sched_getaffinity(0)
    if cores:
        os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
