"""The spread of the log-ratio between processes, which a single process cannot show.

A comparison of several processes stores its variance in the user's cache. A comparison of one process
(`measurement=quick`) pools the stored variances of this device and kind of step with a prior, and widens its interval.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from math import sqrt
from pathlib import Path
from statistics import median_low, variance
from typing import Annotated

import msgspec

from optexp.records.measurement import ProcessSpread
from optexp.support.cache import kept

FEWEST = 3  # fewest processes of a comparison whose variance is stored
MOST = 200  # most stored comparisons of a device
ALIKE = 4.0  # steps whose times differ by less than this factor are of one kind
LARGEST = 16.0  # over the usual variance: a larger one is cut, as one unsteady candidate says little of others
MOST_BYTES = 1_000_000  # of a device's file


class StepKind(StrEnum):
    """Kinds of steps whose time varies alike between processes."""

    CPU = "steps on a CPU"
    HOST_BOUND = "host-bound steps"
    DEVICE_BOUND = "device-bound steps"


@dataclass(frozen=True)
class Prior:
    """Prior standard deviation of the log-ratio between processes, and its weight in degrees of freedom."""

    deviation: float
    freedom: int


# Measured on an H200 (device-bound 0.09 to 0.24 %, host-bound on one core 1.2 to 1.5 %), two quiet cores (2 to 4 %).
PRIORS = {
    StepKind.CPU: Prior(0.03, 6),
    StepKind.HOST_BOUND: Prior(0.015, 6),
    StepKind.DEVICE_BOUND: Prior(0.002, 8),
}


@dataclass(frozen=True)
class Seen:
    """One comparison of several processes: variance of their log-ratios, with its degrees of freedom."""

    kind: StepKind
    step_us: Annotated[float, msgspec.Meta(gt=0)]
    variance: Annotated[float, msgspec.Meta(ge=0)]
    freedom: Annotated[int, msgspec.Meta(ge=1, le=1000)]


def expected(known: Iterable[Seen], kind: StepKind, step_us: float) -> ProcessSpread:
    """The expected spread of such steps: the pooled variance of prior and stored comparisons, with outliers cut."""
    alike = [seen for seen in known if seen.kind is kind and 1 / ALIKE < seen.step_us / step_us < ALIKE]
    prior = PRIORS[kind]
    freedom = prior.freedom + sum(seen.freedom for seen in alike)
    known_variance = prior.deviation**2
    largest = LARGEST * max(known_variance, median_low([known_variance, *(seen.variance for seen in alike)]))
    pooled = prior.freedom * known_variance + sum(seen.freedom * min(seen.variance, largest) for seen in alike)
    count = len(alike)
    source = f"as {kind} do"
    if count:
        source += f", {count} earlier comparison{'s' if count > 1 else ''} on this device among them"
    return ProcessSpread(sqrt(pooled / freedom), freedom, source)


def seen(kind: StepKind, step_us: float, log_ratios: Sequence[float]) -> Seen | None:
    """A comparison's own spread; None where it has too few processes."""
    if len(log_ratios) < FEWEST:
        return None
    return Seen(kind, step_us, variance(log_ratios), len(log_ratios) - 1)


# --- from one comparison to the next ------------------------------------------------------------------------------


def file_of(device: str) -> Path:
    """The file of a device, by its UUID or, for a CPU, its model and the cores in use."""
    return kept(f"process_spread-{device}.json")


def remembered(path: Path) -> list[Seen]:
    """Earlier comparisons; none where nothing can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Seen]) if path.stat().st_size < MOST_BYTES else []
    except (OSError, msgspec.DecodeError):
        return []


def remember(path: Path, found: Seen) -> None:
    """Store a comparison. Where no file can be written, later intervals are only wider."""
    rows = [asdict(row) for row in (*remembered(path), found)][-MOST:]
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(rows) + "\n")
        unfinished.replace(path)  # atomically: comparisons may end at the same time
