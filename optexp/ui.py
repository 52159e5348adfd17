"""The command `python -m optexp.ui`; its code is `optexp.commands.ui`."""

from __future__ import annotations

import sys

from optexp.commands.ui import main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
