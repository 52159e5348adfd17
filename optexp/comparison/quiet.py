"""Quiet on a card that several comparisons share: while one of them times a program, all others are paused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol


class Quiet(Protocol):
    """Asked for before a program is timed.

    others: a process whose descendants share the card, and are paused meanwhile; none where nobody shares it
    """

    others: Collection[int]

    def begin(self) -> None:
        """Wait until all others are paused; does nothing while they are."""

    def end(self) -> None:
        """Let the others go on; does nothing where they do."""


class Unshared:
    """Of a comparison that has its card to itself."""

    others: Collection[int] = ()

    def begin(self) -> None: ...

    def end(self) -> None: ...
