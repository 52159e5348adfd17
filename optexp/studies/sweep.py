"""A name in configurations outside of the repository; the code is `optexp.sweeps.sweep`."""

from __future__ import annotations

from optexp.sweeps.sweep import SweepCallback as SweepCallback
