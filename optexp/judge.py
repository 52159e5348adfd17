"""The command `python -m optexp.judge`; its code is `optexp.commands.judge`."""

from __future__ import annotations

import sys

from optexp.commands.judge import main as main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
