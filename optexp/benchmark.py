"""The command `python -m optexp.benchmark`; its code is `optexp.commands.kernel_benchmark`."""

from __future__ import annotations

from optexp.commands.kernel_benchmark import main as main

if __name__ == "__main__":
    main()
