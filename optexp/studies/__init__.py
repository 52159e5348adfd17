"""Names that configurations outside of the repository import; the code is `optexp.sweeps`."""

from __future__ import annotations
