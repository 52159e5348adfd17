"""The command `python -m optexp.ab`; its code is `optexp.commands.ab`."""

from __future__ import annotations

import sys

from optexp.commands.ab import main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
