"""The command `python -m optexp.bisect`; its code is `optexp.commands.bisect`."""

from __future__ import annotations

import sys

from optexp.commands.bisect import main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
