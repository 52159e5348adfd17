"""KernelBench's problem files by the size of their inputs: verdicts and seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

from optexp.reporting import markdown

SIZES = (0.0, 0.5, 2.0, 5.0, 6.5, 17.0)  # GiB
KEYS = ("file", "verdict", "seconds", "input_gib")  # of an outcome that the table shows


def text(rows: Sequence[Mapping[str, Any]]) -> str:
    """rows: outcomes of `tests/benchmarks/kernelbench.py`, with KEYS"""
    largest, slowest = max(rows, key=lambda row: row["input_gib"]), max(rows, key=lambda row: row["seconds"])
    verified = sum(row["verdict"] == "VERIFIED" for row in rows)
    cells = []
    for least, most in pairwise(SIZES):
        chosen = [row for row in rows if least <= row["input_gib"] < most]
        if chosen:
            seconds = sorted(row["seconds"] for row in chosen)
            count = [len(chosen), sum(row["verdict"] == "VERIFIED" for row in chosen)]
            figures = (seconds[0], median(seconds), seconds[-1])
            cells.append([f"{least:g} to {most:g} GiB", *map(str, count), *(f"{value:.0f}" for value in figures)])
    heads = ["inputs", "files", "VERIFIED", "shortest [s]", "median [s]", "longest [s]"]
    extremes = (
        f"The largest inputs are those of `{name(largest)}`, {largest['input_gib']:.0f} GiB; the longest comparison is"
        f" `{name(slowest)}`, {slowest['seconds']:.0f} s."
    )
    return f"{verified} of {len(rows)} files are VERIFIED.\n\n{markdown.table(heads, cells)}\n\n{extremes}"


def name(row: Mapping[str, Any]) -> str:
    return str(row["file"]).rpartition("/")[2].removesuffix(".py").rstrip("_")
