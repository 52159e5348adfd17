"""Quiet for a comparison that shares its card: while it times a program, all others on the card are paused."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Collection
from contextlib import suppress
from typing import Protocol

BEGIN, GRANTED, END = b"b", b"g", b"e"  # messages of one byte; `optexp.comparison.shared_card` answers GRANTED to BEGIN


class Quiet(Protocol):
    """Asked for before a program is timed.

    others:      a process whose descendants share the card, and are paused meanwhile; none without other comparisons
    sharing:     number of comparisons that share the card's memory
    again_alone: whether a comparison that runs out of memory is made again, with the card to itself
    """

    others: Collection[int]
    sharing: int
    again_alone: bool

    def begin(self) -> None:
        """Wait until all others are paused; does nothing while they are."""

    def end(self) -> None:
        """Let the others go on; does nothing where they do."""


class Unshared:
    """The card has one comparison: nothing to pause."""

    others: Collection[int] = ()
    sharing = 1
    again_alone = False

    def begin(self) -> None: ...

    def end(self) -> None: ...


class Throughout(Unshared):
    """All others are paused from the job's start to its end: nothing more to pause, and nothing to resume."""

    def __init__(self, quiet: Quiet) -> None:
        self.others, self.sharing, self.again_alone = quiet.others, quiet.sharing, quiet.again_alone


class Shared:
    """A worker process on a card with several workers: its parent pauses and resumes the others.

    address: of the parent's `SharedCard`
    sharing: workers of the card
    """

    def __init__(self, address: str, sharing: int, again_alone: bool = False) -> None:
        self.others: Collection[int] = (os.getppid(),)
        self.sharing, self.again_alone = sharing, again_alone
        self.held = False
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.connect(f"\0{address}")

    def begin(self) -> None:
        if not self.held:
            answer = b""
            with suppress(OSError):
                self.socket.sendall(BEGIN)
                answer = self.socket.recv(1)
            if answer != GRANTED:
                sys.exit("the process that shares out this card has ended")
            self.held = True

    def end(self) -> None:
        if self.held:
            self.held = False
            with suppress(OSError):
                self.socket.sendall(END)
