"""Commands that people type: `python -m optexp.audit`, `.doctor` and `.benchmark` start them."""

from __future__ import annotations

from optexp.support import bytecode

bytecode.keep()  # before a command imports torch
