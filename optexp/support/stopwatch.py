"""Time of a whole command by phase; step times are measured by `optexp.measurement.clock`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class Stopwatch:
    """Wall seconds by phase; a phase entered twice adds up."""

    def __init__(self, head_start_s: float = 0.0) -> None:
        self.begin = time.monotonic() - head_start_s
        self.seconds: dict[str, float] = {"import": head_start_s} if head_start_s else {}

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        start = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - start

    @property
    def total(self) -> float:
        return time.monotonic() - self.begin

    def rounded(self) -> dict[str, float]:
        """All phases and the total, in seconds."""
        return {name: round(value, 3) for name, value in {**self.seconds, "total": self.total}.items()}


def process_age_s() -> float:
    """Seconds since this process started (Linux), so that a command's imports are counted; 0 elsewhere."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        return time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError):
        return 0.0
