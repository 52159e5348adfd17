"""Traces of real steps on a machine that may do other things too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from optexp.insight.trace import Trace, record


def recorded(step: Callable[[], object], path: Path) -> Trace:
    """Five steps on the CPU, after a first one."""
    step()
    record(step, 5, path, torch.device("cpu"))
    return Trace.read(path)
