"""Idle share of a GPU in a trace, by our breakdown and by HolisticTraceAnalysis (`pip install traceinsight`).

    python -m tests.benchmarks.oracle trace.json.gz …

That tool counts from the first to the last work of the GPU in the file; so does this comparison.
"""

from __future__ import annotations

import gzip
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from optexp.profiling import any_trace
from optexp.profiling.breakdown import breakdown
from optexp.profiling.intervals import Union


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


def main(paths: Sequence[str]) -> int:
    worst = 0.0
    for name in paths:
        path = Path(name)
        (whole, steps), other = ours(path), theirs(path)
        if other is None:
            print(f"{path.name}: not read there")
            continue
        worst = max(worst, abs(whole - other))
        print(f"{path.name}: idle {whole:.2f} % here, {other:.2f} % there (of the steps alone {steps:.2f} %)")
    print(f"largest difference: {worst:.2f} points")
    return 0 if worst <= 2 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
