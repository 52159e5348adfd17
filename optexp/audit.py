"""The command `python -m optexp.audit`; its code is `optexp.commands.audit`."""

from __future__ import annotations

import sys

from optexp.commands.audit import main as main
from optexp.commands.audit import problems as problems

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
