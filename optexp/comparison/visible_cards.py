"""PARENT: the cards that this process sees, and how many jobs each may have at once. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence

AT_ONCE, CORES = 4, 4  # most jobs on a card, and fewest cores for each: its arms are set up side by side


def at_once(cards: Sequence[str | None]) -> int:
    """Default number of jobs on a card: at most `AT_ONCE`, each with `CORES` cores of the host; 1 on a CPU."""
    cores = len(os.sched_getaffinity(0))
    return 1 if list(cards) == [None] else max(1, min(AT_ONCE, cores // (CORES * len(cards))))


def cards(device: str) -> list[str | None]:
    """CUDA_VISIBLE_DEVICES of each worker: one card each, or one worker without a card."""
    if device == "cpu":
        return [None]
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return [card.strip() for card in visible.split(",") if card.strip()] or [None]
    return [str(index) for index in range(_count())] or [None]


def _count() -> int:
    """Cards of this machine, from the driver's library: CUDA itself is not started here."""
    import pynvml

    try:
        pynvml.nvmlInit()
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
