"""Traces that optexp did not record: any Chrome trace of torch.profiler, gzipped or not."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from optexp.errors import ConfigError
from optexp.support.garbage import uncollected
from optexp.trace import STEP, Trace

PROFILER_STEP = r"ProfilerStep#\d+"
ON_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}  # categories of events


def read(path: Path, step: str | None = None) -> Trace:
    """The trace in a file, in steps.

    Args:
        step: Regular expression for the whole name of the ranges that are steps. None: ranges of optexp, else those of
            `torch.profiler.profile.step()`, else the whole trace is one step.

    Raises:
        ConfigError: There is no such file, it is no trace, or no range has such a name.
    """
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file, uncollected():
            chrome = json.load(file)
    except OSError as reason:
        raise ConfigError(f"{path} cannot be read: {reason.strerror or reason}") from None
    except (ValueError, EOFError) as reason:
        raise ConfigError(f"{path} cannot be read as JSON: {reason}") from None
    if isinstance(chrome, list):
        chrome = {"traceEvents": chrome}
    if not isinstance(chrome, dict) or not isinstance(chrome.get("traceEvents"), list):
        raise ConfigError(f"{path} is no Chrome trace: it has no list of traceEvents")
    try:
        events = [event for event in chrome["traceEvents"] if isinstance(event, dict)]
        with uncollected():
            return Trace.parse({**chrome, "traceEvents": [*_without_marks(events), *_marks(events, step)]})
    except (KeyError, TypeError, ValueError) as reason:
        raise ConfigError(f"{path} is no trace of torch.profiler: {reason}") from None


def _without_marks(events: Sequence[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
    return (event for event in events if event.get("name") != STEP)


def _marks(events: Sequence[Mapping[str, Any]], step: str | None) -> list[Mapping[str, Any]]:
    """The steps as ranges with optexp's name for a step."""
    ranges = [e for e in events if e.get("ph") == "X" and e.get("cat") == "user_annotation"]
    for pattern in (step,) if step else (re.escape(STEP), PROFILER_STEP):
        if steps := [e for e in ranges if re.fullmatch(pattern, str(e["name"]))]:
            return [{**event, "name": STEP} for event in steps]
    if step:
        raise ValueError(f"no range has a name that {step!r} matches")
    spans = [(float(e["ts"]), float(e["ts"]) + float(e.get("dur", 0))) for e in events if e.get("cat") in ON_HOST]
    if not spans:
        raise ValueError("it holds no operator and no call")
    start, end = min(begin for begin, _ in spans), max(end for _, end in spans)
    return [{"ph": "X", "cat": "user_annotation", "name": STEP, "ts": start, "dur": end - start, "tid": None}]
