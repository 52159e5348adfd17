"""Names that extensions import from here; the code is `optexp.trace`."""

from __future__ import annotations

from optexp.trace import Trace as Trace
