"""The command `python -m optexp.sync`; its code is `optexp.commands.sync`."""

from __future__ import annotations

import sys

from optexp.commands.sync import main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
