"""PARENT: one comparison at a time on each GPU, whichever processes, sweeps or engines started them.

A lock is an flock on a file that is named by the card's UUID. The kernel releases it when its holder ends, so a process
that was killed leaves no card locked.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from optexp.comparison.machine import choose_device
from optexp.measurement.gpu import Gpu

# TMPDIR differs from one SLURM job to another on the same card; this folder does not.
FOLDER = next((Path(folder) for folder in ("/dev/shm", "/tmp") if os.path.isdir(folder)), Path("/tmp"))
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
def locked(setting: str, waiting: Waiting | None) -> Iterator[str]:
    """The device that `device=...` means, which no other comparison uses meanwhile.

    Args:
        waiting: Is entered with the reason while another comparison holds the card; None takes the card all the same.

    Raises:
        ConfigError: torch sees no CUDA device, and one was asked for.
    """
    devices = candidates(setting)
    cards = [card for device in devices if (card := describe(device))]
    if len(cards) < len(devices):  # a CPU, or cards that cannot be told apart
        yield devices[0]
        return
    found = _try(cards)
    if found is None and waiting is not None:
        with waiting(f"another optexp process uses {', '.join(card.device for card in cards)}"):
            while (found := _try(cards)) is None:
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


def _try(cards: Sequence[Card]) -> tuple[str, int] | None:
    """The first card that is free, locked."""
    for card in cards:
        if (descriptor := acquire(card.uuid)) is not None:
            return card.device, descriptor
    return None


def acquire(uuid: str) -> int | None:
    """A descriptor that holds the card's lock until it is closed; None while another process holds the lock."""
    descriptor = _open(FOLDER / f"optexp-{uuid}.lock")
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _open(path: Path) -> int:
    """The lock file of all users: in a sticky folder Linux lets nobody create a file that another user owns."""
    with suppress(FileExistsError):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        os.fchmod(descriptor, 0o666)  # whatever the umask
        return descriptor
    return os.open(path, os.O_RDWR | os.O_CLOEXEC)
