"""The command `python -m optexp.run`; its code is `optexp.commands.run`."""

from __future__ import annotations

from optexp.commands.run import main as main

if __name__ == "__main__":
    main()
