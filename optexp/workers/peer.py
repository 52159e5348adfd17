"""An object in a worker that exchanges tensors with objects in other workers; the parent passes transfers on."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from optexp.measurement import heap, placement
from optexp.profiling.calibration import calibrate
from optexp.records.profile import Calibration
from optexp.workers.transfer import Inbox, Outbox, Tensors, Transfer


class Peer(ABC):
    """Base of an arm and the reference: a device, an outbox and an inbox.

    Its public methods are messages; `optexp.verification.trial.convey` says in which order they come.
    """

    device: torch.device

    def __init__(self) -> None:
        self.outbox: Outbox | None = None
        self.inbox = Inbox()

    def settle(self, device: torch.device, cores: Sequence[int], folders: Sequence[str]) -> None:
        """Take a device and cores; `folders` may hold shared memory, the preferred one first."""
        placement.grant(cores)
        self.device = device
        self.outbox = self.outbox or Outbox(folders, on_device=device.type == "cuda")
        if device.type == "cuda":
            torch.cuda.set_device(device.index if device.index is not None else torch.cuda.current_device())
        else:
            placement.spare_threads()
            heap.keep()

    def send(self, tensors: Tensors) -> Transfer:
        """Announce tensors to another process; they must not change until they are copied."""
        assert self.outbox is not None, "setup comes first"
        return self.outbox.send(tensors)

    def fill(self, piece: int) -> None:
        """Copy a piece of the announced tensors into shared memory."""
        assert self.outbox is not None, "setup comes first"
        self.outbox.fill(piece)

    def by_host(self) -> Transfer:
        """Announce the same again, by a way that every process can see."""
        assert self.outbox is not None, "setup comes first"
        return self.outbox.by_host()

    def expect(self, transfer: Transfer) -> None:
        """Make room for tensors that another process has announced."""
        self.inbox.expect(transfer, self.device)

    def take(self, piece: int) -> None:
        """Copy a piece of them."""
        self.inbox.take(piece)

    def calibrate(self, anew: bool = False, keep: bool = True) -> Calibration:
        """This device's measured ceilings (see `optexp.profiling.calibration.calibrate`)."""
        return calibrate(self.device, anew, keep)

    @abstractmethod
    def rest(self) -> None:
        """Give back memory that another process may need."""

    @abstractmethod
    def turn_parameters(self) -> None:
        """Steps start with other values of the parameters from now on; a second call brings the first ones back."""
