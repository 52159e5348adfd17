"""samples.parquet: every block of every process, so that anyone can repeat the statistics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from optexp.measurement.clock import Timing
from optexp.measurement.gpu import between
from optexp.measurement.samples import MAIN, Pair, Sample

GPU = ("sm_mhz", "memory_mhz", "power_w", "temperature_c", "energy_j")  # of the reading after a pair


def write(samples: Sequence[Sample], path: Path) -> None:
    """Write one row per block: times in µs per step, `start_s` since the first block. No file without blocks."""
    if not any(sample.pairs for sample in samples):
        return
    import pyarrow
    from pyarrow import parquet

    names = {
        "process": pyarrow.int32(),
        "kind": pyarrow.string(),
        "pair": pyarrow.int32(),
        "arm": pyarrow.string(),
        "first": pyarrow.bool_(),
        "steps": pyarrow.int64(),
        "wall_us": pyarrow.float64(),
        "device_us": pyarrow.float64(),
        "start_s": pyarrow.float64(),
        "queued": pyarrow.float64(),
        "kept": pyarrow.bool_(),
        **dict.fromkeys(GPU, pyarrow.float64()),
        "reasons": pyarrow.string(),
    }
    table = pyarrow.Table.from_pylist(list(rows(samples)), schema=pyarrow.schema(list(names.items())))
    parquet.write_table(table, path)


def rows(samples: Sequence[Sample]) -> Iterator[dict[str, Any]]:
    """Rows of the table. `kind` names the program of the candidate's blocks: the candidate itself (main, or cold with
    emptied caches) or, in a control, the baseline (same, delayed).

    Rows that no verdict uses come last, with their aim before the kind: "retried same" for a control that failed and
    was run again, "unbound main" for arms on all cores, "textbook main" and "textbook same" for single trials.
    """
    begin = min(t.start_s for s in samples for p in s.pairs for t in (p.baseline, p.candidate))
    for process, sample in enumerate(samples):
        counts: dict[str, int] = {}
        for pair in sample.pairs:
            index = counts[pair.kind] = counts.get(pair.kind, -1) + 1
            for arm, timing in (("baseline", pair.baseline), ("candidate", pair.candidate)):
                first = pair.baseline_first == (arm == "baseline")
                kind = f"{sample.aim} {pair.kind}".lstrip()
                place = {"process": process, "kind": kind, "pair": index, "arm": arm, "first": first}
                yield place | _block(timing, timing.start_s - begin) | _gpu(pair)


def pairs(path: Path, cold: bool) -> list[list[list[float]]]:
    """By process: µs per step of both arms in all_pairs pair that counts (in all pairs where none counts)."""
    from pyarrow import parquet

    kept_pairs: dict[int, list[list[float]]] = {}
    all_pairs: dict[int, list[list[float]]] = {}
    blocks = [row for row in parquet.read_table(path).to_pylist() if row["kind"] == MAIN]
    for before, after in zip(blocks[::2], blocks[1::2], strict=True):
        pair = [
            row["device_us"] if cold and row["device_us"] is not None else row["wall_us"] for row in (before, after)
        ]
        all_pairs.setdefault(before["process"], []).append(pair)
        if before["kept"]:
            kept_pairs.setdefault(before["process"], []).append(pair)
    return [kept_pairs.get(process, process_pairs) for process, process_pairs in all_pairs.items()]


def _block(timing: Timing, start_s: float) -> dict[str, Any]:
    device_us = None if timing.device_s is None else timing.device_s * 1e6
    times = {"wall_us": timing.wall_s * 1e6, "device_us": device_us, "start_s": start_s}
    return {"steps": timing.steps, **times, "queued": timing.queued}


def _gpu(pair: Pair) -> dict[str, Any]:
    reading = {name: getattr(pair.readings[-1], name) for name in GPU} if pair.readings else {}
    return reading | {"kept": pair.counts, "reasons": ", ".join(between(pair.readings)) if pair.readings else None}
