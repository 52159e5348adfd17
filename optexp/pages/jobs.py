"""Comparisons as rows of a record: what their tables, their verdict and their speedup follow from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optexp.records import filenames
from optexp.result import Result

CLAIM = ("verdict", "headline", "workload", "strategy", "device", "seed", "speedup")
VERIFICATION = ("contract", "ok", "seeds", "unseen")
MEASUREMENT = ("preset", "min_effect", "p_holm", "comparisons", "pairs", "spread")
PROFILE = ("metrics", "top_kernels", "top_ops")
CONFIG = ("workload", "dtype", "strategy", "baseline", "measurement", "mode", "verify", "device")

Row = Mapping[str, Any]


def row(folder: Path, typed: str = "", step: str = "") -> Row:
    """A comparison without what no table shows: traces, tensors, operators, passed watchdogs.

    typed: its overrides;  step: its step in a study

    Raises:
        OSError, ValueError, KeyError, TypeError: The folder holds no record.
    """
    record = json.loads((folder / filenames.RESULT).read_text())
    claim = {key: record[key] for key in CLAIM}
    arms = {arm: _filled(record[arm]) for arm in ("baseline", "candidate")}
    config = {key: value for key, value in record["config"].items() if key.partition(".")[0] in CONFIG}
    parts = {
        "equivalence": _verification(record["equivalence"]),
        "measurement": _measurement(record["measurement"]),
        "profile": _profile(record["profile"]),
    }
    return {"typed": typed, "step": step, **claim, **arms, **parts, "config": config}


def result(row: Row) -> Result:
    """The comparison of a row, as far as the row holds it."""
    return Result.of({key: value for key, value in row.items() if key not in ("typed", "step")} | {"schema": 2})


def _filled(values: Row) -> Row:
    return {key: value for key, value in values.items() if value is not None}


def _verification(held: Row | None) -> Row | None:
    """What passed and what came nearest to its limit."""
    if held is None:
        return None
    worst = {key: held["worst"][key] for key in ("tensor", "gate", "ok", "used")} if held["worst"] else None
    return {**{key: held[key] for key in VERIFICATION}, "worst": worst}


def _measurement(held: Row | None) -> Row | None:
    if held is None:
        return None
    failed = [watch for watch in held["watchdogs"] if not watch["ok"]]
    controls = {name: control for name, control in held["controls"].items() if not control["ok"]}
    cost = {"break_even_steps": held["cost"]["break_even_steps"]}
    return {**{key: held[key] for key in MEASUREMENT}, "watchdogs": failed, "controls": controls, "cost": cost}


def _profile(held: Row) -> Row:
    arms = {}
    for arm in ("baseline", "candidate"):
        profile = held.get(arm) or {}
        arms[arm] = {key: profile[key][:1] if key != "metrics" else profile[key] for key in PROFILE if key in profile}
    return {**arms, "calibration": held.get("calibration")}
