"""Idle share of a GPU in a trace, by our breakdown and by HolisticTraceAnalysis (`pip install traceinsight`).

    python -m tests.benchmarks.oracle trace.json.gz … [--record FOLDER]

That tool counts from the first to the last work of the GPU in the file; so does this comparison.
"""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from optexp.pages.blocks import keep
from optexp.pages.record import Record
from optexp.profiling import any_trace
from optexp.profiling.breakdown import breakdown
from optexp.profiling.intervals import Union

LIMIT = 2.0  # points that both may differ by


def ours(path: Path) -> tuple[float, float]:
    """Idle share in % from the first to the last work on the GPU; and of the steps, where our terms add up."""
    trace = any_trace.read(path, step=".*")  # the whole file: any range begins a step
    busy = Union([*(k.interval for k in trace.kernels), *(c.interval for c in trace.copies)])
    intervals = list(busy)
    span = intervals[-1][1] - intervals[0][0]
    found = breakdown(any_trace.read(path))
    return 100 * (1 - busy.total / span), 100 * (1 - (found.busy or 0.0))


def theirs(path: Path) -> float | None:
    """Idle share in % as HolisticTraceAnalysis gives it; None where one of its own assertions fails."""
    from hta.trace_analysis import TraceAnalysis  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as folder:
        _in_ns(path, Path(folder) / "rank_0.json.gz")
        analysis = TraceAnalysis(trace_files={0: str(Path(folder) / "rank_0.json.gz")}, trace_dir=folder)
        try:
            table = analysis.get_temporal_breakdown(visualize=False)
        except AssertionError:
            return None
    return float(table["idle_time_pctg"].iloc[0])


def _in_ns(path: Path, copy: Path) -> None:
    """Write a copy with times in ns: that tool rounds each one down to a whole number, of µs a third of a short kernel.

    A share of the time stays the same.
    """
    chrome = json.loads(gzip.decompress(path.read_bytes()))
    first = min(event["ts"] for event in chrome["traceEvents"] if event.get("ph") == "X")
    for event in chrome["traceEvents"]:
        for key in ("ts", "dur"):
            if key in event:
                event[key] = round(1e3 * (event[key] - (first if key == "ts" else 0.0)))
    copy.write_bytes(gzip.compress(json.dumps(chrome).encode()))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="of the page's record")
    asked, rows = parser.parse_args(arguments), []
    for path in asked.traces:
        (whole, steps), other = ours(path), theirs(path)
        rows.append({"trace": path.name, "ours": round(whole, 3), "theirs": other and round(other, 3)})
        there = "not read there" if other is None else f"{other:.2f} % there"
        print(f"{path.name}: idle {whole:.2f} % here, {there} (of the steps alone {steps:.2f} %)")
    found = Record("idle", "", rows)
    print(f"\n{found.text()}")
    if asked.record:
        keep(found, "why.idle", asked.record)
    return 0 if all(row["theirs"] is None or abs(row["ours"] - row["theirs"]) <= LIMIT for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
