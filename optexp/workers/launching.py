"""The launcher that all comparisons of a command share, started before anything slow is imported here."""

from __future__ import annotations

import atexit

from optexp.workers.process import Launcher

_launcher: Launcher | None = None


def launcher() -> Launcher:
    """One launcher serves all comparisons of this process: torch is imported once."""
    global _launcher
    if _launcher is None or not _launcher.alive:
        _launcher = Launcher()
        atexit.register(_launcher.close)
    return _launcher
