"""The fastest of a few configs of one computation on this card: measured once, cached per card."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
import triton

from optexp.kernelkit.kernel import ceil_div
from optexp.kernelkit.recording import recorded
from optexp.measurement import clock
from optexp.support.cache import kept

T = TypeVar("T")
Key = tuple[object, ...]

RECORDED = 10  # calls in a graph
CLOSE, TURNS = 1.05, 8  # further looks at those within 5 % of the fastest; each works in other memory, worth 1 %

_chosen: dict[Key, object] = {}


def fastest(what: str, key: Key, candidates: Sequence[T], run: Callable[[T], object], device: torch.device) -> T:
    """The candidate whose `run` takes least device time; each may run many times.

    Where nothing can be timed (on a CPU, during graph capture) and the cache has no answer, the first candidate.

    what:        the name of the computation
    key:         everything else that the answer depends on: dtypes, shapes
    candidates:  configs; their `str` goes into the cache's key
    run:         computes with a config
    """
    if device.type != "cuda" or len(candidates) == 1:
        return candidates[0]
    known = (what, device.index, *key, *candidates)  # of another layout there may be fewer configs
    choice = _chosen.get(known)
    if choice is not None:
        return choice  # type: ignore[return-value]
    file = _file(device)
    label = json.dumps([what, *map(str, key), *map(str, candidates)])
    index = _remembered(file).get(label)
    if index is None:
        if torch.cuda.is_current_stream_capturing():
            return candidates[0]
        index = _race(candidates, run, device)
        _remember(file, label, index)
    _chosen[known] = candidates[index]
    return candidates[index]


def bucket(count: int) -> int:
    """The key of counts that share an answer: those between the same powers of two."""
    return count.bit_length()


def _race(candidates: Sequence[T], run: Callable[[T], object], device: torch.device) -> int:
    """The index of the fastest; those that are close take turns once more."""
    times = [[_seconds(partial(run, candidate), device)] for candidate in candidates]
    leaders = [index for index, (first,) in enumerate(times) if first <= CLOSE * min(times)[0]]
    for _ in range(TURNS if len(leaders) > 1 else 0):
        for index in leaders:
            times[index].append(_seconds(partial(run, candidates[index]), device))
    torch.cuda.empty_cache()  # what the graphs worked in is of no use to anybody else
    return min(leaders, key=lambda index: median(times[index]))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Device time of a call, infinite where it does not compile here or needs too much.

    Several calls are recorded in a graph: one after the other from Python, those shorter than their launch would be
    ranked by what the host takes to ask for them. So it remains where a call cannot be captured.
    """
    try:
        work()
        once = clock.time_block(work, 3, device).device_s or 0.0
        steps = max(3, min(100, int(1e-3 / max(once, 1e-6))))
        calls = min(steps, RECORDED)
        try:
            several: Callable[[], object] = recorded([work] * calls, device)
        except RuntimeError:
            several, calls = work, 1
        blocks = [clock.device_step_s(several, ceil_div(steps, calls), device) for _ in range(3)]
    except (triton.runtime.errors.OutOfResources, torch.OutOfMemoryError) as error:
        # Triton's error and the frames that it went through hold each other, and in backward those hold the autograd
        # graph: until garbage is collected, leaves would remember today's stream, which breaks a capture on another.
        error.__traceback__ = None
        return float("inf")
    return median(blocks) / calls


@cache
def _file(device: torch.device) -> Path:
    properties = torch.cuda.get_device_properties(device)
    facts = [properties.name, properties.multi_processor_count, torch.__version__, triton.__version__, _sources()]
    key = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return kept(f"tuning-{key}.json")


@cache
def _sources() -> str:
    """Stands for the code that was timed: of another, another config may be the fastest."""
    folders = [Path(next(iter(import_module("optexp.kernels").__path__))), Path(__file__).parent]
    files = [file for folder in folders for kind in ("*.py", "*.cu*") for file in sorted(folder.glob(kind))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _remembered(file: Path) -> dict[str, int]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}


def _remember(file: Path, label: str, index: int) -> None:
    """Another process may write at the same time: what it found is lost, and found again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(_remembered(file) | {label: index}, indent=1) + "\n")
        unfinished.replace(file)
    except OSError:
        pass  # a home that cannot be written to costs a second per process, nothing else
