"""Where a worker finds the user's code, and the Python that runs it: two versions of a program have two homes."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """One version of the user's code.

    folder:      working folder of its workers
    path:        entries of PYTHONPATH; the interpreter adds its own libraries
    interpreter: Python that runs them
    elsewhere:   folder of another version, from which its workers must import nothing; None for none
    torch:       version of torch in another environment than this process's; "" for none
    """

    folder: Path
    path: tuple[str, ...]
    interpreter: str = sys.executable
    elsewhere: Path | None = None
    torch: str = ""


@dataclass(frozen=True)
class Homes:
    """Homes of the arms of a comparison: the candidate's, and the one of all others."""

    baseline: Home
    candidate: Home

    def of(self, arm: str) -> Home:
        """The home of the arm of that name."""
        return self.candidate if arm == "candidate" else self.baseline
