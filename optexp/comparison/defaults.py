"""Defaults in place of options that a command left open."""

from __future__ import annotations

from optexp.config import Experiment, search_path
from optexp.strategy import label


def taken(experiment: Experiment) -> str:
    """A sentence for people; empty where the command names a workload and what to do with it."""
    typed, parts = search_path.typed(), list[str]()
    if "workload" not in typed:
        parts.append(f"no workload named (workload=…): {experiment.workload.name}")
    if experiment.mode == "compare" and "strategy" not in typed and not experiment.strategies:
        other = f"the plain program is compared with {label(experiment.baseline)}"
        what = other if experiment.baseline else "baseline alone, compared with itself"
        parts.append(f"no strategy named (strategy=…): {what}")
    timed = experiment.verify != "only" and experiment.mode != "profile"
    if parts and timed and "measurement" not in typed:
        parts.append(f"measurement={experiment.measurement.preset}")
    return "; ".join(parts)
