"""The command `python -m optexp.read`; its code is `optexp.commands.read`."""

from __future__ import annotations

import sys

from optexp.commands.read import main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
