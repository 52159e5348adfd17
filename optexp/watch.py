"""The command `python -m optexp.watch`; its code is `optexp.commands.watch`."""

from __future__ import annotations

import sys

from optexp.commands.watch import main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
