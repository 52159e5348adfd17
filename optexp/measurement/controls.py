"""Controls of a measurement: two equal programs must not differ, and a known delay must be found."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from datetime import datetime
from math import exp, isinf, log
from pathlib import Path
from typing import Any

from optexp.measurement import statistics
from optexp.measurement.samples import DELAYED, SAME, Sample
from optexp.measurement.settings import MeasurementSettings
from optexp.records.measurement import Control, ProcessSpread
from optexp.support.cache import kept
from optexp.support.units import percent

DELAY = 1.05
NAMES = {SAME: "A/A", DELAYED: "known delay"}


def judge(
    samples: Sequence[Sample], settings: MeasurementSettings, spread: ProcessSpread | None = None
) -> dict[str, Control]:
    """The controls by name. A control whose interval is too wide to find the delay has not failed, only found nothing.

    spread: expected spread between processes, for a comparison of one process
    """
    return {name: _judge(kind, samples, settings, spread) for kind, name in NAMES.items()}


def _judge(
    kind: str, samples: Sequence[Sample], settings: MeasurementSettings, spread: ProcessSpread | None
) -> Control:
    if not any(s.of(kind) for s in samples):
        return Control(kind, True, True, "skipped: an exact delay needs blocks of 20 steps, and warm caches")
    processes = [ratios for s in samples if (ratios := [-pair.log_ratio for pair in s.of(kind) if pair.counts])]
    if not processes:
        return Control(kind, True, False, "the GPU was slowed in every pair: nothing to tell from")
    interval = statistics.interval(processes, settings.confidence, spread)
    if isinf(interval.half_width):
        return Control(kind, True, False, "too few pairs to tell")
    truth, tolerance = (log(DELAY) if kind == DELAYED else 0.0), log(1 + settings.min_effect)
    ok = interval.low <= truth + tolerance and interval.high >= truth - tolerance
    found = interval.half_width <= log(DELAY) if kind == SAME else interval.low > 0 or interval.high < 0
    estimate, low, high = (exp(end) - 1 for end in (interval.estimate, interval.low, interval.high))
    basis = f"{estimate:+.1%}, {percent(settings.confidence)} interval {low:+.1%} to {high:+.1%}"
    if kind == SAME:
        text = f"a second process of the baseline takes {basis}"
        text += "" if found else f": too noisy to tell, a difference of {DELAY - 1:.0%} would not be seen here"
    else:
        text = f"a delay of {DELAY - 1:.0%} was {'' if found else 'not '}found: {basis}"
        text += "" if found else ": smaller differences than this interval's width cannot be seen here"
    return Control(
        kind, ok, found, text if ok else f"{text}: the measurement is wrong here", 1 + estimate, 1 + low, 1 + high
    )


def failed(controls: dict[str, Control]) -> list[str]:
    return [f"control {name}: {control.text}" for name, control in controls.items() if not control.ok]


# --- once per device and workload --------------------------------------------------------------------------------


def cache_file(key: str) -> Path:
    return kept(f"controls-{key}.json")


def remembered(path: Path) -> dict[str, Control]:
    """Controls that passed here before, with their dates; empty where no file can be read."""
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        known = {name: Control(**facts) for name, facts in found.items()}
    except (OSError, ValueError, TypeError):
        return {}
    return {name: replace(c, text=f"{c.text} (remembered from {c.since})") for name, c in known.items()}


def remember(path: Path, controls: dict[str, Control]) -> None:
    """Write the controls if all passed and found their truth; a noisy control is measured again the next time."""
    if not all(control.ok and control.found for control in controls.values()):
        return
    today = f"{datetime.now():%Y-%m-%d}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(
            json.dumps({name: asdict(replace(c, since=today)) for name, c in controls.items()}, indent=2) + "\n"
        )
        unfinished.replace(path)
    except OSError:
        pass  # without the file, the controls are measured again
