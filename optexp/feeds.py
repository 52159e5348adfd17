"""Names that extensions import from here; the code is `optexp.program.feeds`."""

from __future__ import annotations

from optexp.program.feeds import HostFeed as HostFeed
from optexp.program.feeds import LoaderFeed as LoaderFeed
