"""`python -m optexp.audit result.json`: does the verdict follow from the record, and is the record as it was written?

Offline: nothing is run again. The digest shows an edit that forgot it; an edit that did not has to keep a whole record
consistent: pairs, what is computed from them, verdict, headline, gates, tensors (errors, limits, and what is made of
them), mutants, seeds, families, evidence, watchdogs, and the files beside it (samples.parquet, config.yaml,
environment.json). What stands there once, and follows from nothing, is named.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import isclose, log, nan
from pathlib import Path
from statistics import median
from typing import Any

from optexp.measurement import statistics
from optexp.reporting.wording import headline
from optexp.result import Result, Verdict, against_itself, digest, finite

Record = Mapping[str, Any]
BLOCKS, ASKED, MACHINE = "samples.parquet", "config.yaml", "environment.json"
ARMS = ("baseline", "candidate")
# What looks at every measurement; of those that may find something, a verdict stands beside what the second list finds.
WATCHDOGS = (
    "slow start", "work ahead", "skipped steps", "throttling", "power cap", "foreign processes", "recompilation",
    "waiting arm", "work aside", "inputs", "physical floor", "cores", "batches", "modes", "drift", "order",
    "device and wall",
)  # fmt: skip
REMARKS = ("power cap", "inputs", "cores", "modes", "drift", "order", "device and wall")
CONTROLS = ("A/A", "known delay")
GATES = {"BITWISE": "BITWISE", "PRECISION": "CAP"}  # that a contract has to itself
RAW = {
    "peak memory": "peak_mib", "set-up time": "setup_s", "single steps": "alone_us", "energy": "energy_j",
    "kernels": "kernels", "cold caches": "cold_us", "busy share": "gpu_busy",
}  # fmt: skip
DROPPED, DELAY = 0.1, 1.05  # share of pairs that may not count; how much longer the known delay makes a step
CLAIMS = {Verdict.FASTER, Verdict.SLOWER, Verdict.SAME, Verdict.VERIFIED}  # the others promise nothing


def problems(record: Record) -> list[str]:
    """What is wrong with a record, in sentences; none where everything follows."""
    parts = (_edited, _verdict, _asked, _speedup, _figures, _kept, _trust, _headline, _verification, _contract)
    return [problem for part in parts for problem in part(record)]


def underived(record: Record, folder: Path) -> list[str]:
    """What it says that follows from nothing: it may be wrong, and nobody could tell."""
    if not _claims(record):
        return []
    missing = [("device", MACHINE), ("workload, dtype, strategy and protocol", ASKED), ("pairs", BLOCKS)]
    if not record["measurement"].get("pairs"):
        missing.pop()
    names = [f"{what} (no {name} beside it)" for what, name in missing if not (folder / name).is_file()]
    shown = [name for name, figure in RAW.items() if any(record[arm].get(figure) is not None for arm in ARMS)]
    return [*shown, "what gates, mutants and evidence saw", *names]


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
    found = _own(measurement, interval)
    if found in (Verdict.FASTER, Verdict.SLOWER) and against_itself(record["config"]):
        return Verdict.INVALID
    # One of many comparisons: by itself it would be a claim.
    lost = found in (Verdict.FASTER, Verdict.SLOWER) and measurement.get("p_holm", 0.0) >= 1 - _confidence(record)
    return Verdict.INCONCLUSIVE if lost else found


def _own(measurement: Record, interval: statistics.Interval) -> Verdict:
    """The verdict of pairs and watchdogs by themselves, before a correction for many comparisons."""
    undecided = any(watch.get("undecides") and not watch["ok"] for watch in measurement.get("watchdogs", []))
    if undecided or (len(measurement["pairs"]) == 1 and statistics.too_noisy(interval)):
        return Verdict.INCONCLUSIVE
    return statistics.decide(interval, measurement["min_effect"])


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


def _claims(record: Record) -> bool:
    return Verdict(record["verdict"]) in CLAIMS or bool(record["speedup"])


def _asked(record: Record) -> Iterator[str]:
    """What was compared, where, is what the configuration asked for."""
    if not _claims(record):
        return
    config, label = record["config"], "+".join(record["strategy"]) or "baseline"
    for name, said in (("workload", record["workload"]), ("device", record["device"]), ("strategy", label)):
        if config.get(name) != said:
            yield f"{name} is {said}, and {config.get(name)} was asked for"
    if record["environment"].get("device") != record["device"]:
        yield f"device is {record['device']}, and the environment's {record['environment'].get('device')}"


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
    count = len(record["measurement"]["pairs"])
    if claimed["processes"] != count:
        yield f"{claimed['processes']} processes are named, and pairs of {count} listed"
    least = 1 if record["config"].get("isolation") == "none" else record["config"].get("measurement.processes_min", 1)
    if count < least:
        yield f"pairs of {count} processes are listed, and at least {least} were asked for"
    for name, value in zip(("estimate", "low", "high"), interval.ratios(), strict=True):
        if claimed[name] is not None and not isclose(claimed[name], value, rel_tol=1e-9):
            yield f"speedup.{name} is {claimed[name]:.6g}, and the pairs give {value:.6g}"
    yield from _chance(record["measurement"])


def _figures(record: Record) -> Iterator[str]:
    """Times of each arm, and what each process came to, follow from the pairs."""
    measurement = record["measurement"]
    pairs = measurement.get("pairs")
    if not record["speedup"] or not pairs:
        return
    for place, arm in enumerate(ARMS):
        yield from _differs(f"{arm}.step_us", record[arm]["step_us"], _typical(pairs, place))
        if setups := measurement.get("setups_s", {}).get(arm):
            yield from _differs(f"{arm}.setup_s", record[arm]["setup_s"], median(setups))
        if (power := record[arm].get("power_w")) is not None:
            needed = power * (record[arm].get("load_us") or nan) / 1e6
            yield from _differs(f"{arm}.energy_j", record[arm].get("energy_j"), needed, "power_w and load_us give")
    samples = [(record[arm]["throughput"] or 0.0) * _typical(pairs, place) for place, arm in enumerate(ARMS)]
    yield from _differs("samples of a step of the candidate", samples[1], samples[0], "those of the baseline are")
    processes, ratios = measurement.get("processes", []), _ratios(pairs)
    if len(processes) != len(ratios):
        yield f"{len(processes)} processes are listed, and pairs of {len(ratios)}"
    for process, found in zip(processes, ratios, strict=False):
        yield from _differs("log_ratio of a process", process["log_ratio"], median(found))
        yield from _differs("pairs of a process", process["pairs"], len(found))


def _kept(record: Record) -> Iterator[str]:
    """Pairs that do not count are few, and a watchdog says why."""
    measurement = record["measurement"]
    dropped = sum(map(len, measurement.get("dropped", ())))
    if not record["speedup"] or not dropped:
        return
    every = dropped + sum(map(len, measurement["pairs"]))
    if dropped > DROPPED * every:
        yield f"{dropped} of {every} pairs were dropped"
    if not any("pairs dropped" in watch["text"] for watch in measurement.get("watchdogs", ())):
        yield f"{dropped} pairs were dropped, and no watchdog says why"


def _typical(pairs: Sequence[Sequence[Sequence[float]]], place: int) -> float:
    return median(median(pair[place] for pair in process) for process in pairs)


def _differs(name: str, said: float | None, found: float, source: str = "the pairs give") -> Iterator[str]:
    if said is None or not isclose(said, found, rel_tol=1e-9, abs_tol=1e-12):
        yield f"{name} is {said}, and {source} {found:.6g}"


def _trust(record: Record) -> Iterator[str]:
    """Every watchdog looked, every control that was asked for ran, and none of them refuses the measurement."""
    measurement, config = record["measurement"], record["config"]
    if not record["speedup"]:
        return
    watches, controls = measurement.get("watchdogs", []), measurement.get("controls", {})
    if tuple(watch["name"] for watch in watches) != WATCHDOGS:
        missing = [name for name in WATCHDOGS if name not in [watch["name"] for watch in watches]]
        yield f"watchdogs are missing: {', '.join(missing)}" if missing else "a watchdog is listed twice"
    for watch in watches:
        accepted = watch["name"] == "foreign processes" and config.get("environment.allow_foreign")
        dropped = re.search(r"(\d+) of (\d+) pairs dropped", watch["text"])
        few = dropped is not None and int(dropped[1]) <= DROPPED * int(dropped[2])
        undecided = watch.get("undecides") and Verdict(record["verdict"]) is Verdict.INCONCLUSIVE
        if not (watch["ok"] or accepted or few or undecided or watch["name"] in REMARKS):
            yield f"watchdog {watch['name']} refuses it: {watch['text']}"
    unmeasured = any(note.startswith("no controls:") for note in measurement.get("notes", []))
    if config.get("measurement.controls") and not unmeasured and tuple(controls) != CONTROLS:
        yield f"controls were asked for, and there are {', '.join(controls) or 'none'}"
    for name, control in controls.items():
        truth = DELAY if name == "known delay" else 1.0
        known = control.get("low") is not None and control.get("high") is not None
        far = known and not _within(truth, control["low"], control["high"], measurement["min_effect"])
        if not control["ok"] or far:
            yield f"control {name} failed"
    asked, cold = config.get("measurement.l2"), measurement.get("l2", {}).get("headline") == "cold"
    excused = any(note.startswith("measurement.l2=") for note in measurement.get("notes", []))
    if cold != (asked == "cold") and not excused:
        yield f"measurement.l2={asked} was asked for, and caches were {'emptied' if cold else 'warm'}"


def _within(truth: float, low: float, high: float, tolerance: float) -> bool:
    return low <= truth * (1 + tolerance) * (1 + 1e-9) and high * (1 + tolerance) * (1 + 1e-9) >= truth


def _headline(record: Record) -> Iterator[str]:
    """Word for word what the record gives, its precision and its weakness included."""
    said, interval = record["headline"], _interval(record)
    if not record["speedup"] or interval is None:
        return
    found = Result.of(record)
    measurement = {"l2": {"headline": "warm"}} | found.measurement
    # By itself, as it was before a correction for many comparisons.
    own = _own(record["measurement"], interval)
    precision = _dtype(record["equivalence"].get("contract", "")) or record["config"].get("dtype", "float32")
    against, weakest = record["config"].get("baseline", "baseline"), record["equivalence"].get("weakest")
    assert found.speedup is not None
    estimate, low, high = interval.ratios()
    speedup = replace(found.speedup, estimate=estimate, low=low, high=high)
    given = replace(found, verdict=own, measurement=measurement, speedup=speedup)
    text = headline(given, precision, against, _weakness(weakest))
    before, corrected, alone = said.partition("by itself ")
    if found.verdict is own:
        before, alone = "", said
    if (alone or corrected) and alone != text:
        yield f"the headline says {alone!r}, and the record gives {text!r}"
    if "×" in before:
        yield f"the headline says {before!r}, which the record does not give"


def _weakness(weakest: Record | None) -> str | None:
    if not weakest:
        return None
    from optexp.equivalence.finding import Verification  # torch is slow to import

    return Verification.of({"contract": "", "weakest": weakest}).weakness


def _dtype(contract: str) -> str:
    return contract.partition("(")[2].rstrip(")")


def _contract(record: Record) -> Iterator[str]:
    """The promise is the one by whose gates the results were judged."""
    found = record["equivalence"]
    if not _claims(record) or not found.get("gates"):
        return
    name = found["contract"].partition("(")[0]
    if bool(_dtype(found["contract"])) != (name == "PRECISION") or name not in ("REASSOCIATES", *GATES):
        yield f"there is no contract {found['contract']}"
    if (own := GATES.get(name)) and own not in found["gates"]:
        yield f"the contract is {found['contract']}, and its gate {own} is missing"
    if name != "PRECISION" and GATES["PRECISION"] in found["gates"]:
        yield f"the contract is {found['contract']}, and the gates are those of PRECISION"
    if name == "BITWISE" and not (found["bitwise"] or found.get("unchecked_bits")):
        yield "the contract is BITWISE, and bits differ"


def _chance(measurement: Record) -> Iterator[str]:
    if measurement.get("p_value") is None:
        yield "there is no p_value"
        return
    p, found = measurement["p_value"], statistics.p_value(_ratios(measurement["pairs"]), measurement["min_effect"])
    if not isclose(p, found, rel_tol=1e-3, abs_tol=1e-9):
        yield f"p_value is {p:.3g}, and the pairs give {found:.3g}"
    if measurement.get("p_holm", p) < p:
        yield "p_holm is less than p_value: a correction for many comparisons makes no claim surer"


def _verification(record: Record) -> Iterator[str]:
    """A claim, or any speedup, rests on gates that passed, over tensors that are listed, with mutants that were caught,
    and on the evidence of every strategy."""
    if not _claims(record):
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
    from optexp.equivalence import account  # torch is slow to import

    yield from account.problems(record)
    worst = found["worst"]
    if found["tensors"].get(worst["tensor"], {}).get("used") != worst["used"]:
        yield f"{worst['tensor']} is nearest to its limit, and not listed so"
    if found["failures"]:
        yield f"{len(found['failures'])} failures are listed"
    if not any(row["caught"] for row in found["mutants"].values()):
        yield "no mutant was caught: nothing shows that the gates see anything"
    parts = [found["recheck"].get(part) for part in ("fresh inputs", "ok")]
    if Verdict(record["verdict"]).measured and None in parts:
        yield "what was timed was not checked again"
    elif False in parts:
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
    """The record's pairs are those of the blocks that were written down one by one; what was asked, and where it ran,
    stands in files of its own."""
    if _claims(record):
        yield from _copied(record, folder)
    pairs, blocks = record["measurement"].get("pairs"), folder / BLOCKS
    if not pairs or not blocks.is_file():
        return
    from optexp.measurement import table  # slow to import

    cold = record["measurement"].get("l2", {}).get("headline") == "cold"
    if table.pairs(blocks, cold) != pairs:
        yield f"{BLOCKS} beside it holds other pairs than the record"
    device = table.pairs(blocks, cold=True)
    for place, arm in enumerate(ARMS):
        if (said := record[arm].get("device_us")) is not None:
            yield from _differs(f"{arm}.device_us", said, _typical(device, place), f"{BLOCKS} beside it gives")


def _copied(record: Record, folder: Path) -> Iterator[str]:
    # The machine of a winner that was measured again is described where that was done.
    machine = folder / record["by_itself"].get("again", "") / MACHINE
    files: dict[str, Path] = {"config": folder / ASKED, "environment": machine}
    for part, path in files.items():
        if not path.is_file():
            continue
        held = json.loads(path.read_text()) if path.suffix == ".json" else _yaml(path)
        held = finite(json.loads(json.dumps(held, default=str)))  # as a record holds it: JSON's keys are strings
        keys = sorted(key for key in {*held, *record[part]} if held.get(key) != record[part].get(key))
        if keys:
            yield f"{path.name} beside it says otherwise about {', '.join(keys)}"


def _yaml(path: Path) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(OmegaConf.load(path))


# --- the command -----------------------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """0: every record follows from itself; 3: one does not; 1: one cannot be read."""
    if not arguments or "--help" in arguments:
        print("optexp.audit: name a record, as in python -m optexp.audit outputs/2026-11-21/13-59-15/result.json")
        return 1
    worst = 0
    for path in map(Path, arguments):
        try:
            record = json.loads(path.read_text())
            found = [*problems(record), *_beside(record, path.parent)]
        except (OSError, ValueError, KeyError, TypeError) as error:
            reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            print(f"{path}: cannot be read as a record ({reason})")
            worst = 1
            continue
        pairs = sum(map(len, record["measurement"].get("pairs") or []))
        basis = f"{pairs} pairs, {len(record['equivalence'].get('tensors') or {})} tensors"
        print(f"{path}: {record['verdict']}, " + ("does not hold" if found else f"follows from the record ({basis})"))
        for problem in found:
            print(f"  {problem}")
        if raw := underived(record, path.parent):
            print(f"  not derivable: {', '.join(raw)}")
        worst = worst or (3 if found else 0)
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
