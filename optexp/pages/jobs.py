"""Comparisons as rows of a record: what their tables, their verdict and their speedup follow from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from optexp.records import filenames
from optexp.result import Result

CLAIM = ("verdict", "headline", "workload", "strategy", "device", "seed", "speedup")
VERIFICATION = ("contract", "ok", "seeds", "unseen")
MEASUREMENT = ("preset", "min_effect", "p_holm", "comparisons", "pairs", "spread")
PROFILE = ("metrics", "top_kernels", "top_ops")
CONFIG = ("workload", "dtype", "strategy", "baseline", "measurement", "mode", "verify", "device")

DIGITS, ROUNDING = 6, 1e-4  # of a block's time in a row; relative error of a speedup that follows from such times

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


def whole(folder: Path) -> Row:
    """A comparison with all that the terminal shows of it.

    Raises:
        OSError, ValueError, KeyError, TypeError: The folder holds no record.
    """
    record = json.loads((folder / filenames.RESULT).read_text())
    measurement = record["measurement"]
    if measurement:
        measurement = {**measurement, "pairs": _rounded(measurement["pairs"]), "dropped": []}
    kept = {key: value for key, value in record.items() if key != "digest"}
    return {
        **kept,
        "series": [],
        "measurement": measurement,
        "profile": {**record["profile"], **_arms(record["profile"])},
    }


def result(row: Row) -> Result:
    """The comparison of a row, as far as the row holds it."""
    return Result.of({key: value for key, value in row.items() if key not in ("typed", "step")} | {"schema": 2})


def _filled(values: Row) -> Row:
    return {key: value for key, value in values.items() if value is not None}


def _verification(held: Row | None) -> Row | None:
    """The outcome of verification, and the tensor nearest to its limit."""
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
    whole = {key: held[key] for key in MEASUREMENT} | {"pairs": _rounded(held["pairs"])}
    return {**whole, "watchdogs": failed, "controls": controls, "cost": cost}


def _rounded(pairs: Sequence[Sequence[Sequence[float]]]) -> list[list[list[float]]]:
    """Times with DIGITS digits."""
    return [[[float(f"{us:.{DIGITS}g}") for us in pair] for pair in process] for process in pairs]


def _profile(held: Row) -> Row:
    return {**_arms(held), "calibration": held.get("calibration")}


def _arms(held: Row) -> Row:
    """Metrics of both arms, and the longest kernel and operator of each."""
    arms = {}
    for arm in ("baseline", "candidate"):
        profile = held.get(arm) or {}
        arms[arm] = {key: profile[key][:1] if key != "metrics" else profile[key] for key in PROFILE if key in profile}
    return arms
