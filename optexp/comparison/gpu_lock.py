"""PARENT: one comparison at a time on each GPU, whichever processes, sweeps or engines started them.

A lock is an flock on a file that is named by the card's UUID. The kernel releases it when its holder ends, so a process
that was killed leaves no card locked.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass

import torch

from optexp.comparison.machine import choose_device
from optexp.measurement.gpu import Gpu
from optexp.support import file_lock

FOLDER = file_lock.FOLDER
POLL_S = 0.2

Waiting = Callable[[str], AbstractContextManager[None]]


@dataclass(frozen=True)
class Card:
    """A GPU as arms call it ("cuda:1"), with its UUID and model."""

    device: str
    uuid: str
    name: str


def candidates(setting: str) -> list[str]:
    """Devices that `device=...` may mean, the preferred one first: auto may be any card of the first card's model.

    Raises:
        ConfigError: torch sees no CUDA device, and one was asked for.
    """
    first = choose_device(setting)
    if setting != "auto" or first == "cpu":
        return [first]
    cards = [card for number in range(torch.cuda.device_count()) if (card := describe(f"cuda:{number}"))]
    return [card.device for card in cards if card.name == cards[0].name] or [first]


def describe(device: str) -> Card | None:
    """The card behind a device; None on a CPU, for a MIG slice, and where NVML does not answer."""
    gpu = Gpu.open(torch.device(device)) if device != "cpu" else None
    uuid = gpu.ask("nvmlDeviceGetUUID") if gpu else None
    return Card(device, str(uuid), str(gpu.ask("nvmlDeviceGetName"))) if gpu and uuid else None


@contextmanager
def locked(setting: str, waiting: Waiting | None, shared: bool = False) -> Iterator[str]:
    """The device that `device=...` means, which no other comparison uses meanwhile.

    Args:
        waiting: Is entered with the reason while another comparison holds the card; None takes the card all the same.
        shared: Comparisons that ask for the same share the card.

    Raises:
        ConfigError: torch sees no CUDA device, and one was asked for.
    """
    devices = candidates(setting)
    cards = [card for device in devices if (card := describe(device))]
    if len(cards) < len(devices):  # a CPU, or cards that cannot be told apart
        yield devices[0]
        return
    found = _try(cards, shared)
    if found is None and waiting is not None:
        with waiting(f"another optexp process uses {', '.join(card.device for card in cards)}"):
            while (found := _try(cards, shared)) is None:
                time.sleep(POLL_S)
    device, descriptor = found or (cards[0].device, None)
    try:
        yield device
    finally:
        if descriptor is not None:
            os.close(descriptor)


@contextmanager
def announced(reason: str) -> Iterator[None]:
    """For `locked` in a command that shows no progress: say on stderr why it waits."""
    print(f"optexp: waiting: {reason}", file=sys.stderr, flush=True)
    yield


def _try(cards: Sequence[Card], shared: bool) -> tuple[str, int] | None:
    """The first card that is free, locked."""
    for card in cards:
        if (descriptor := acquire(card.uuid, shared)) is not None:
            return card.device, descriptor
    return None


def acquire(uuid: str, shared: bool = False) -> int | None:
    """A descriptor that holds the card's lock until it is closed; None while another process holds the lock."""
    return file_lock.acquire(FOLDER / f"optexp-{uuid}.lock", shared)
