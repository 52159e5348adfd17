"""`python -m optexp.audit result.json`: does the verdict follow from the record, and is the record as it was written?

Offline: nothing is run again. The digest shows an edit that forgot it; an edit that did not has to keep a whole record
consistent: pairs, interval, verdict, headline, gates, tensors, evidence, and the blocks in samples.parquet beside it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import isclose, log
from pathlib import Path
from typing import Any

from optexp.measurement import statistics
from optexp.result import Verdict, digest
from optexp.wording import at_least

Record = Mapping[str, Any]
BLOCKS = "samples.parquet"
CLAIMS = {Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.VERIFIED}  # the others promise nothing


def problems(record: Record) -> list[str]:
    """What is wrong with a record, in sentences; none where everything follows."""
    return [*_edited(record), *_verdict(record), *_speedup(record), *_verification(record)]


def derived(record: Record) -> Verdict | None:
    """The verdict that the record's own facts give; None where it holds none."""
    equivalence, measurement = record["equivalence"], record["measurement"]
    if record["error"]:
        return Verdict.UNVERIFIED if record["error"]["type"] == "NoReference" else Verdict.ERROR
    if any(not proof["engaged"] for proof in record["evidence"]):
        return Verdict.NOT_ENGAGED
    if not equivalence:
        return None
    if not equivalence["ok"]:
        return Verdict.NOT_EQUIVALENT
    controls = measurement.get("controls", {}).values()
    watches = [watch for watch in measurement.get("watchdogs", []) if watch["fatal"]]
    if not all(fact["ok"] for fact in (*controls, *watches)):
        return Verdict.INVALID
    interval = _interval(record)
    if interval is None:
        return Verdict.VERIFIED
    if len(measurement["pairs"]) == 1 and statistics.too_noisy(interval):
        return Verdict.INCONCLUSIVE
    found = statistics.decide(interval, measurement["min_effect"])
    # One of many comparisons: by itself it would be a claim.
    lost = found in (Verdict.FASTER, Verdict.SLOWER) and measurement.get("p_holm", 0.0) >= 1 - _confidence(record)
    return Verdict.INCONCLUSIVE if lost else found


# --- what can be wrong -----------------------------------------------------------------------------------------


def _edited(record: Record) -> Iterator[str]:
    if "digest" not in record:
        yield "there is no digest: the record was not written by this version, or cut"
    elif record["digest"] != digest(record):
        yield "the digest does not fit: the record was changed after it was written"


def _verdict(record: Record) -> Iterator[str]:
    verdict, found = Verdict(record["verdict"]), derived(record)
    if verdict in CLAIMS and verdict is not found:
        yield f"the verdict is {verdict}, and the record gives {found or 'none'}"
    if not record["headline"].startswith(verdict):
        yield f"the headline does not begin with the verdict: {record['headline']}"
    if not verdict.measured and verdict is not Verdict.PROFILED and record["speedup"]:
        yield f"a speedup is shown with {verdict}"


def _speedup(record: Record) -> Iterator[str]:
    claimed, interval = record["speedup"], _interval(record)
    if not claimed:
        return
    if interval is None:
        yield "a speedup is shown, and no pairs that it comes from"
        return
    facts = {**claimed, "min_effect": record["measurement"]["min_effect"]}
    for name in ("confidence", "min_effect"):
        asked = record["config"].get(f"measurement.{name}", facts[name])
        if facts[name] != asked:
            yield f"{name} is {facts[name]}, and {asked} was asked for"
    if claimed["processes"] != len(record["measurement"]["pairs"]):
        yield f"{claimed['processes']} processes are named, and pairs of {len(record['measurement']['pairs'])} listed"
    for name, value in zip(("estimate", "low", "high"), interval.ratios(), strict=True):
        if claimed[name] is not None and not isclose(claimed[name], value, rel_tol=1e-9):
            yield f"speedup.{name} is {claimed[name]:.6g}, and the pairs give {value:.6g}"
    yield from _chance(record["measurement"])
    if record["verdict"] == Verdict.FASTER and f"at least {at_least(interval.ratios()[1])}×" not in record["headline"]:
        yield f"the headline does not name the interval's low end, {at_least(interval.ratios()[1])}×"


def _chance(measurement: Record) -> Iterator[str]:
    if "p_value" not in measurement:
        return
    p, found = measurement["p_value"], statistics.p_value(_ratios(measurement["pairs"]), measurement["min_effect"])
    if not isclose(p, found, rel_tol=1e-3, abs_tol=1e-9):
        yield f"p_value is {p:.3g}, and the pairs give {found:.3g}"
    if measurement.get("p_holm", p) < p:
        yield "p_holm is less than p_value: a correction for many comparisons makes no claim surer"


def _verification(record: Record) -> Iterator[str]:
    """A claim, or any speedup, rests on gates that passed, over tensors that are listed, with mutants that were caught,
    and on the evidence of every strategy."""
    if Verdict(record["verdict"]) not in CLAIMS and not record["speedup"]:
        return
    found = record["equivalence"]
    if len(record["evidence"]) != len(record["strategy"]):
        yield f"{len(record['evidence'])} of {len(record['strategy'])} strategies show that they engaged"
    missing = [part for part in ("seeds", "reference", "gates", "tensors", "families") if not found.get(part)]
    if missing:
        yield f"{record['verdict']} without a verification: {', '.join(missing)} missing"
        return
    for gate, outcome in found["gates"].items():
        if not outcome["passed"]:
            yield f"gate {gate} failed"
    for name, tensor in found["tensors"].items():
        if not tensor["ok"] or tensor["used"] is None or tensor["used"] > 1:
            yield f"{name} is beyond its limit"
    if found["failures"]:
        yield f"{len(found['failures'])} failures are listed"
    if not any(row["caught"] for row in found["mutants"].values()):
        yield "no mutant was caught: nothing shows that the gates see anything"
    if Verdict(record["verdict"]).measured and not found["recheck"]:
        yield "what was timed was not checked again"
    elif not all(found["recheck"].get(part, True) for part in ("ok", "fresh inputs")):
        yield "what was timed was checked again, and failed"


def _interval(record: Record) -> statistics.Interval | None:
    measurement = record["measurement"]
    pairs: Sequence[Sequence[Sequence[float]]] = measurement.get("pairs") or []
    if not pairs:
        return None
    return statistics.interval(_ratios(pairs), _confidence(record))


def _ratios(pairs: Sequence[Sequence[Sequence[float]]]) -> list[list[float]]:
    return [[log(before / after) for before, after in process] for process in pairs]


def _confidence(record: Record) -> float:
    given: float = (record["speedup"] or {}).get("confidence") or record["config"].get("measurement.confidence", 0.99)
    return given


def _beside(record: Record, folder: Path) -> Iterator[str]:
    """The record's pairs are those of the blocks that were written down one by one."""
    pairs, blocks = record["measurement"].get("pairs"), folder / BLOCKS
    if not pairs or not blocks.is_file():
        return
    from optexp.measurement import table  # slow to import

    cold = record["measurement"].get("l2", {}).get("headline") == "cold"
    if table.pairs(blocks, cold) != pairs:
        yield f"{BLOCKS} beside it holds other pairs than the record"


# --- the command -----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """0: every record follows from itself; 3: one does not; 1: one cannot be read."""
    if not arguments:
        print("optexp.audit: name a record, as in python -m optexp.audit outputs/2026-11-21/13-59-15/result.json")
        return 1
    worst = 0
    for path in map(Path, arguments):
        try:
            record = json.loads(path.read_text())
            found = [*problems(record), *_beside(record, path.parent)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            print(f"{path}: cannot be read as a record ({type(error).__name__}: {error})")
            worst = 1
            continue
        pairs = sum(map(len, record["measurement"].get("pairs") or []))
        basis = f"{pairs} pairs, {len(record['equivalence'].get('tensors') or {})} tensors"
        print(f"{path}: {record['verdict']}, " + ("does not hold" if found else f"follows from the record ({basis})"))
        for problem in found:
            print(f"  {problem}")
        worst = worst or (3 if found else 0)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
