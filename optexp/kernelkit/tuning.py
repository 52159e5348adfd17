"""The fastest of several configs of a computation on this card, measured once and cached per card."""

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
CLOSE, TURNS = 1.05, 8  # further timings of configs within 5 % of the fastest; other memory alone changes a time by 1 %

_chosen: dict[Key, object] = {}


def fastest(what: str, key: Key, candidates: Sequence[T], run: Callable[[T], object], device: torch.device) -> T:
    """The candidate whose `run` takes least device time; `run` may be called many times for each.

    The first candidate, where nothing can be timed (on a CPU, during graph capture) and the cache has no answer.

    what:        name of the computation
    key:         all other facts that the answer depends on, such as dtypes and shapes
    candidates:  configs; their `str` goes into the cache's key
    run:         computes with a config
    """
    if device.type != "cuda" or len(candidates) == 1:
        return candidates[0]
    known = (what, device.index, *key, *candidates)  # with candidates: another layout may have fewer
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
    """A key under which counts between the same powers of two share an answer."""
    return count.bit_length()


def _race(candidates: Sequence[T], run: Callable[[T], object], device: torch.device) -> int:
    """The index of the fastest candidate; candidates close to it are timed again in turns."""
    times = [[_seconds(partial(run, candidate), device)] for candidate in candidates]
    leaders = [index for index, (first,) in enumerate(times) if first <= CLOSE * min(times)[0]]
    for _ in range(TURNS if len(leaders) > 1 else 0):
        for index in leaders:
            times[index].append(_seconds(partial(run, candidates[index]), device))
    torch.cuda.empty_cache()  # the graphs' memory cannot be reused
    return min(leaders, key=lambda index: median(times[index]))


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Device seconds of a call; infinite where it does not compile or needs too many resources.

    Several calls are recorded in a graph: launched from Python, calls shorter than their launch would be ranked by host
    time. A call that cannot be captured is timed from Python.
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
        # Triton's error and its frames form a cycle, and in backward the frames hold the autograd graph: until garbage
        # is collected, leaves would be tied to this stream, which breaks a capture on another stream.
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
    """A hash of all kernel sources: for other code, another config may be the fastest."""
    folders = [Path(next(iter(import_module("optexp.kernels").__path__))), Path(__file__).parent]
    files = [file for folder in folders for kind in ("*.py", "*.cu*") for file in sorted(folder.glob(kind))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _remembered(file: Path) -> dict[str, int]:
    try:
        return dict(json.loads(file.read_text()))
    except (OSError, ValueError):
        return {}


def _remember(file: Path, label: str, index: int) -> None:
    """Store an answer. An answer that another process writes meanwhile may be lost, and is then measured again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(_remembered(file) | {label: index}, indent=1) + "\n")
        unfinished.replace(file)
    except OSError:
        pass  # without the file, each process measures again
