"""Traces of real steps on a machine that may do other things too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from optexp.trace import Trace, record

CPU = torch.device("cpu")


def undisturbed(step: Callable[[], object], path: Path) -> Trace:
    """The quickest of three recordings."""

    def recorded() -> Trace:
        record(step, 5, path, CPU)
        return Trace.read(path)

    step()
    return min((recorded() for _ in range(3)), key=lambda trace: trace.window[1] - trace.window[0])
