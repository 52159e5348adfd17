"""The command `python -m optexp.doctor`; its code is `optexp.commands.doctor`."""

from __future__ import annotations

from optexp.commands.doctor import main as main

if __name__ == "__main__":
    main()
