"""The recorded comparison with which a new result may be compared."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass

from optexp.reporting.mlflow_store import Node
from optexp.reporting.recorded import Recorded, records
from optexp.reporting.titles import flatten
from optexp.result import Result, finite

NEAREST_OF = 50  # newest records among which the nearest one is searched
TORCH = "torch"


def identity(result: Result) -> dict[str, str]:
    """The facts under which two results may be compared, by name: the fingerprint of a regression.

    They are workload and its keys, both stacks and their options, dtype, device with its cores, and torch's
    major.minor. Preset, seed and the user's code are left out: code is what a regression is about.
    """
    stacks = ("workload", "strategy", "baseline")
    flat = json.loads(json.dumps(finite(flatten(result.config)), default=str))
    facts = {
        key: value if isinstance(value, str) else json.dumps(value)
        for key, value in flat.items()
        if key.partition(".")[0] in stacks or key == "dtype"
    }
    cores = len(result.placement.cpus) if result.placement else 0
    device = f"{result.device_model}, {cores} core{'s' if cores != 1 else ''}" if cores else result.device_model
    version = re.match(r"\d+\.\d+", str(result.environment.get("torch")))
    return {**facts, "workload": result.workload, "device": device, TORCH: version[0] if version else "unknown"}


def differences(recorded: Mapping[str, str], new: Mapping[str, str]) -> dict[str, list[str]]:
    """Facts of two identities that differ, as [recorded, new]; one that is missing is "none"."""
    names = sorted({*recorded, *new})
    pairs = {name: [recorded.get(name, "none"), new.get(name, "none")] for name in names}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


@dataclass(frozen=True)
class Match:
    """The newest record of the same identity, or the nearest other one with its differences, or neither."""

    record: Recorded | None = None
    nearest: Recorded | None = None
    differs: Mapping[str, list[str]] | None = None


def match(config: Node, against: str, result: Result) -> Match:
    """The record that a new result is compared with; one that raised an alarm itself is none.

    Args:
        against: As in `records`.

    Raises:
        TrackingError: as `records`.
    """
    wanted, nearest = identity(result), Match()
    for count, record in enumerate(records(config, against, result.workload)):
        if not _comparable(record, against) or record.run_id == result.environment.get("mlflow_run"):
            continue
        differs = differences(identity(record.result), wanted)
        if not differs:
            return Match(record)
        if count < NEAREST_OF and (nearest.differs is None or len(differs) < len(nearest.differs)):
            nearest = Match(nearest=record, differs=differs)
    return nearest


def _comparable(record: Recorded, against: str) -> bool:
    """Whether it was timed, and raised no alarm, unless it is the one that was named."""
    seen = record.result.regression
    return record.result.speedup is not None and not (seen and seen.alarm and record.run_id != against)
