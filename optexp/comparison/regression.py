"""A new result beside a recorded one: by how much its step became slower, by intervals, and who is told."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from math import isfinite, log1p
from pathlib import Path

from optexp.config.regression_settings import RegressionSettings
from optexp.errors import TrackingError
from optexp.measurement.arm_times import Arm, log_speedup, log_time
from optexp.measurement.contrast import Uncertain, combined
from optexp.measurement.statistics import Interval
from optexp.records.measurement import Ratio
from optexp.records.regression import Outcome, Regression
from optexp.reporting import matching
from optexp.reporting.mlflow_store import Node
from optexp.reporting.recorded import Recorded
from optexp.result import Result
from optexp.support.units import duration, percent, ratio

ALERT_LIMIT_S = 60  # that an alert's command may take


def check(settings: RegressionSettings, store: Node, result: Result) -> Regression:
    """The regression of a timed result against the record that the settings name.

    A store that cannot be read, or that holds no such record, ends "not compared".
    """
    assert settings.against
    try:
        found = matching.match(store, settings.against, result)
    except TrackingError as error:
        return _not_compared(settings, str(error))
    if found.record is not None:
        return compared(settings, found.record, result)
    if found.nearest is None or found.differs is None:
        return _not_compared(settings, f"{settings.against} has no timed record of {result.workload}")
    changed = ", ".join(f"{name} {old} → {new}" for name, (old, new) in found.differs.items())
    text = (
        f"{settings.against} has no record of the same fingerprint; run {found.nearest.run_id[:8]} differs: {changed}"
    )
    return replace(_not_compared(settings, text), differs=dict(found.differs))


def compared(settings: RegressionSettings, record: Recorded, result: Result) -> Regression:
    """Two timed results of the same fingerprint.

    The interval of each change is Student's t over both results' processes (Welch). The alarm asks for an interval
    that lies beyond the threshold as a whole.
    """
    old = record.result
    assert result.speedup
    assert result.measurement
    assert old.measurement
    confidence = result.speedup.confidence
    times, baseline_times = (
        _change(*(log_time(measured, arm, confidence) for measured in (old.measurement, result.measurement)))
        for arm in (Arm.CANDIDATE, Arm.BASELINE)
    )
    losses = _change(*(log_speedup(measured, confidence) for measured in (result.measurement, old.measurement)))
    changes = {"time": times.interval(confidence), "speedup": losses.interval(confidence)}
    baseline = baseline_times.interval(confidence)
    outcome = decide(changes[settings.figure], settings.threshold)
    words = {"time": "time/step", "speedup": "loss of speedup"}[settings.figure]
    change = as_ratio(changes[settings.figure], confidence)
    of = f"run {record.run_id[:8]} of {record.started:%Y-%m-%d %H:%M}"
    text = f"{words} {change.text} against {of}, {_steps(old, result)}"
    if outcome is Outcome.ALARM and settings.figure == "time" and baseline.low > log1p(settings.threshold) / 2:
        text += "; the baseline became slower too: the machine, or code that both arms have"
    return Regression(
        outcome, f"{text}; threshold {percent(settings.threshold)}", settings.against or "", settings.threshold,
        settings.figure, record.run_id, as_ratio(changes["time"], confidence), as_ratio(baseline, confidence),
        as_ratio(changes["speedup"], confidence),
    )  # fmt: skip


def decide(change: Interval, threshold: float) -> Outcome:
    """The outcome of a change as a log-ratio: above 0 is slower."""
    limit = log1p(threshold)
    if change.low > limit:
        return Outcome.ALARM
    return Outcome.NO_REGRESSION if change.high <= limit else Outcome.UNDECIDED


def _change(before: Uncertain, after: Uncertain) -> Uncertain:
    return combined([(1, after), (-1, before)])


def as_ratio(change: Interval, confidence: float) -> Ratio:
    """A change as a ratio for people; an upper end that no float holds is None."""
    estimate, low, high = change.ratios()
    text = f"{ratio(estimate)} ({percent(confidence)} interval {low:.3g} to {high:.3g})"
    return Ratio(estimate, low, high if isfinite(high) else None, text)


def _steps(old: Result, new: Result) -> str:
    before, after = (duration((arm.step_us or 0.0) / 1e6) for arm in (old.candidate, new.candidate))
    return f"{before} → {after}"


def _not_compared(settings: RegressionSettings, text: str) -> Regression:
    return Regression(Outcome.NOT_COMPARED, text, settings.against or "", settings.threshold, settings.figure)


# --- an alarm ----------------------------------------------------------------------------------------------------


def alert(command: str, result: Result, folder: Path) -> None:
    """Run the user's command; a failure is said on stderr, and changes no verdict."""
    seen = result.regression
    assert seen
    facts = {
        "SUMMARY": f"{result.workload} · {result.label}: {seen.text}",
        "WORKLOAD": result.workload,
        "STRATEGY": result.label,
        "AGAINST": seen.run_id,
        "RUN": str(result.environment.get("mlflow_run", "")),
        "CHANGE": f"{seen.time.estimate:.4f}" if seen.time else "",
        "FOLDER": str(folder.absolute()),
    }
    send(command, facts)


def send(command: str, facts: dict[str, str]) -> None:
    """Run a shell command with facts in its environment, as OPTEXP_ALERT_<name>."""
    environment = os.environ | {f"OPTEXP_ALERT_{name}": value for name, value in facts.items()}
    try:
        done = subprocess.run(command, shell=True, env=environment, timeout=ALERT_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        print(f"optexp: on_alert was ended after {ALERT_LIMIT_S} s: {command}", file=sys.stderr)
        return
    if done.returncode:
        print(f"optexp: on_alert ended with status {done.returncode}: {command}", file=sys.stderr)
