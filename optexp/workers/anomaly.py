"""The line of a user's forward pass whose gradient failed: in the traceback of an error in backward all is torch's."""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from itertools import takewhile

ENGINE = "_engine_run_backward"  # the last frame in Python of a backward pass that fails in torch
BEGIN = "Traceback of forward call that caused the error"
LONG = ("CUDA error", "out of memory")  # of a device that is broken, or full


def hides_forward(error: BaseException) -> bool:
    """Whether an error was raised by an operator of a backward pass, of which its traceback says nothing."""
    trace, last = error.__traceback__, ""
    while trace is not None:
        last, trace = trace.tb_frame.f_code.co_name, trace.tb_next
    return last == ENGINE and not any(text in str(error) for text in LONG)


def forward_frames(again: Callable[[], object]) -> list[tuple[str, str]]:
    """File and text of each frame of the forward call whose gradient fails, as torch's anomaly mode knows them.

    Args:
        again: what raised the error; it is done once more
    """
    torch = sys.modules["torch"]
    with warnings.catch_warnings(record=True) as told, suppress(Exception, SystemExit):
        warnings.simplefilter("always")
        with torch.autograd.set_detect_anomaly(True, check_nan=False):
            again()
    texts = [str(warning.message) for warning in told if BEGIN in str(warning.message)]
    lines = texts[-1].partition(BEGIN)[2].splitlines()[1:] if texts else []
    frames: list[tuple[str, str]] = []
    for line in takewhile(lambda line: line.startswith("  "), lines):
        if found := re.match(r'  File "(.*)", line \d+, in ', line):
            frames.append((found[1], line))
        elif frames:
            frames[-1] = frames[-1][0], f"{frames[-1][1]}\n{line}"
    return frames
