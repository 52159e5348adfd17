"""The command `python -m optexp.history`; its code is `optexp.commands.history`."""

from __future__ import annotations

import sys

from optexp.commands.history import main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
