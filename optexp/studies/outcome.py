"""A name in configurations outside of the repository; the code is `optexp.sweeps.exit_status`."""

from __future__ import annotations

from optexp.sweeps.exit_status import ExitStatus as ExitStatus
