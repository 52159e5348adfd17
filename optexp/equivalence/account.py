"""Does what a verification says follow from its own numbers? Looks at what stands in `result.json`; nothing runs again.

Who raises an error has to raise its limit, and with it what the report says would have been seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from math import inf, isclose
from typing import Any

from optexp.equivalence import dice, trajectory
from optexp.equivalence.families import FAMILIES, NONCONTIGUOUS, NORMAL
from optexp.equivalence.gates import TOLERANCES, factors, share
from optexp.equivalence.mutants import MUTANTS
from optexp.verification.recheck import RANDOM
from optexp.verification.verify import SAME_BATCHES

Record = Mapping[str, Any]
CONTRACTS = {"BITWISE": "BITWISE", "PRECISION": "CAP"}  # and the gate that each has to itself
NAMED = {function.__name__.replace("_", " ") for functions in MUTANTS.values() for function in functions}
# Wherever a tensor of that kind has a size, it can be changed so.
ALWAYS = {"out": ("scaled", "one element off"), "grad": ("scaled",), "change": ("rate off by 1 percent", "no update")}


def problems(record: Record) -> Iterator[str]:
    """What does not fit, in sentences."""
    for part in (_seeds, _gates, _tensors, _ratios, _mutants, _families, _followed, _randomness, _recheck):
        yield from part(record, record["equivalence"])


def _seeds(record: Record, found: Record) -> Iterator[str]:
    sets, asked = len(set(found["seeds"])), record["config"].get("measurement.verification_seeds")
    if asked is not None and sets != asked and SAME_BATCHES not in found["notes"]:
        yield f"{sets} fresh input sets are listed, and {asked} were asked for"
    said = re.search(r"(\d+) fresh input sets?\b", found["headline"])
    if said is None or int(said[1]) != len(found["seeds"]):
        yield f"{len(found['seeds'])} fresh input sets are listed, and the verification says: {found['headline']}"


def _gates(record: Record, found: Record) -> Iterator[str]:
    own = CONTRACTS.get(found["contract"].partition("(")[0])
    asked = {"G0", "G1", "G2", "G3", *filter(None, [own]), *(["DICE"] if _random(found) else [])}
    if missing := asked - found["gates"].keys():
        yield f"gates are missing: {', '.join(sorted(missing))}"
    if others := found["gates"].keys() - asked - {"FIRST"}:
        yield f"no such gates were asked: {', '.join(sorted(others))}"


def _tensors(record: Record, found: Record) -> Iterator[str]:
    for name, tensor in found["tensors"].items():
        yield from (f"{name}: {problem}" for problem in _tensor(name, tensor))


def _tensor(name: str, t: Record) -> Iterator[str]:
    """Error, limit and what is made of them, as in `optexp.equivalence.gates.measure`."""
    if t["error_rms"] is None:
        if t["used"] or t["allowed"] or t["gate"] not in ("G0", "EXACT", "SKIPPED"):
            yield "nothing was measured that it could have used of a limit"
        return
    allowed, scale = t["allowed"], t["scale"]
    used = {gate: share(error, limit) for gate, (error, limit) in allowed.items()}
    if not {"G1", "G2"} <= used.keys():
        yield "errors and their limits are missing"
        return
    (error, limit), (peak, peak_limit) = allowed["G1"], allowed["G2"]
    yield from _differs("used", t["used"], max(used.values()))
    yield from _differs(f"used of {t['gate']}", used.get(t["gate"]), t["used"])
    for gate in allowed.keys() & {"G1", "CAP"}:
        yield from _differs(f"error_rms beside {gate}", t["error_rms"], allowed[gate][0])
    yield from _differs("error_ratio", t["error_ratio"], share(error, t["baseline_rms"]))
    if scale:
        for said, expected in zip(t["visible"] or (None, None), (limit / scale, peak_limit / scale), strict=True):
            yield from _differs("visible", said, expected)
    ours, theirs = t["element"]["candidate"], t["element"]["reference"]
    if None not in (ours, theirs):
        weight = scale / (abs(theirs) + scale) if scale else 1.0
        yield from _differs("error of the worst element", peak, abs(ours - theirs) * weight)
    gradient, yardstick = name.startswith("grad/"), t["yardstick_rms"]
    for row in TOLERANCES.values():
        warn, fail = factors(row, gradient)
        for rounding in (row.floor, row.peak_floor):  # of many elements, and of few
            floor = rounding * row.unit * scale + t["resolution"]
            if isclose(limit, fail * yardstick + floor, rel_tol=1e-9):
                if t["weak"] != (error > warn * yardstick + floor):
                    yield f"an error of {error:.6g} is {'not ' * t['weak']}weak"
                return
    yield f"no row of tolerances gives its limit of {limit:.6g}"


def _ratios(record: Record, found: Record) -> Iterator[str]:
    """What is said of all tensors covers those that are listed."""
    listed = found["tensors"].values()
    for gate, ratio in (("G1", "error_ratio"), ("G2", "max_ratio"), ("G3", "block_ratio")):
        worst = found["gates"].get(gate, {}).get("worst_ratio")
        most = max((t[ratio] for t in listed if t[ratio] is not None), default=0.0)
        if worst is not None and worst < most:
            yield f"{gate} has a worst ratio of {worst:.6g}, and a tensor one of {most:.6g}"
    weakest = max((t["error_ratio"] or 0.0 for t in listed if t["weak"]), default=0.0)
    if weakest > (found["weakest"].get("error_ratio") or 0.0):
        yield f"a tensor has {weakest:.3g} times the baseline's error, and is not named as the weakest"
    if found["bitwise"] and not all(t["bitwise"] for t in listed if t["gate"] != "SKIPPED"):
        yield "bits are said to be equal, and those of a tensor differ"


def _mutants(record: Record, found: Record) -> Iterator[str]:
    """Nothing but what was too small to be seen has survived, and that by name."""
    mutants = found["mutants"]
    if unknown := mutants.keys() - NAMED:
        yield f"there are no mutants {', '.join(sorted(unknown))}"
    kinds = {name.partition("/")[0] if "/" in name else "out" for name in found["visible"]}
    if not kinds:
        yield "nothing says which errors would have been seen"
    asked = {mutant for kind in kinds for mutant in ALWAYS.get(kind, ())}
    if missing := asked - mutants.keys():
        yield f"mutants are missing: {', '.join(sorted(missing))}"
    for name, row in mutants.items():
        if not 0 <= row["caught"] <= row["tried"] or row["tried"] != row["caught"] + len(set(row["passed"])):
            passed = len(set(row["passed"]))
            yield f"mutant '{name}': {row['tried']} tried, {row['caught']} caught, and {passed} named that passed"


def _families(record: Record, found: Record) -> Iterator[str]:
    families, tails, thorough = found["families"], found["tails"], record["config"].get("measurement.thorough")
    if families[:1] != [NORMAL] or len(set(families)) != len(families):
        yield f"families of inputs are {', '.join(families)}"
    if unknown := set(families) - {NORMAL, NONCONTIGUOUS, *FAMILIES}:
        yield f"there are no families of inputs {', '.join(sorted(unknown))}"
    said = re.search(r" and (\d+) other famil", found["headline"])
    elsewhere = any(f"of inputs at {sizes}" in found["headline"] for sizes in tails)
    others = int(said[1]) if said else 0
    if others > len(families) - 1 or (others < len(families) - 1 and not elsewhere):
        yield f"{len(families) - 1} other families of inputs are listed, and the verification says: {found['headline']}"
    if any(f"of inputs at {sizes}" not in found["headline"] for sizes in tails):
        yield f"odd sizes are listed, and the verification says: {found['headline']}"
    if thorough is False and (tails or len(families) > 1 or found["trajectory"]):
        yield "families of inputs, odd sizes or many steps are listed, and were not asked for"
    told = any("prove nothing" in note or "not checked at" in note for note in found["notes"])
    if thorough and len(families) == 1 and not tails and not told and _declares(record["workload"]):
        yield "other families of inputs or odd sizes were asked for, and there are none"


def _declares(workload: str) -> bool:
    """Whether it is one of ours, to which other inputs than the usual ones mean something."""
    try:
        module = import_module(f"optexp.workloads.{workload}")
    except ImportError:
        return False
    own = [cls for cls in vars(module).values() if getattr(cls, "__module__", None) == module.__name__]
    return any(len(getattr(cls, "families", ())) > 1 for cls in own)


def _followed(record: Record, found: Record) -> Iterator[str]:
    config, path = record["config"], found["trajectory"]
    trains = config.get("workload.mode") == "train"
    if trains and config.get("measurement.thorough") and not path:
        yield "training was not followed"
    if path and not (path["steps"] == trajectory.STEPS > path["step"] >= 0):
        yield f"training was followed for {path['steps']} steps, and is for {trajectory.STEPS}"
    if path and (path["share"] is None or not 0 <= path["share"] <= 1):
        yield f"the loss strays {path['share']} times as far as rounding explains"


def _random(found: Record) -> bool:
    """Whether anything says that steps draw random numbers."""
    said = "at its real rate" in found["headline"] or found["recheck"].get("note") == RANDOM
    return bool(found["randomness"]) or "DICE" in found["gates"] or said


def _randomness(record: Record, found: Record) -> Iterator[str]:
    if not _random(found):
        return
    tests, p = found["randomness"].get("tests", 0), found["randomness"].get("smallest_p")
    if not tests or found["randomness"]["seeds"] != dice.SEEDS or p is None:
        yield "steps draw random numbers, and their distributions were not compared"
    elif not dice.ALARM <= p * tests <= tests:
        yield f"distributions differ: p = {p:.1g} in one of {tests} tests"
    if found["randomness"].get("slopes_off", 0.0) > found["randomness"].get("slopes_limit", inf):
        yield "gradients are not those of the loss of the same draw"


def _recheck(record: Record, found: Record) -> Iterator[str]:
    """The process that was measured last repeated what it had timed."""
    recheck, pairs = found["recheck"], record["measurement"].get("pairs") or []
    if not recheck or not pairs:
        return
    if recheck.get("process") != len(pairs):
        yield f"process {recheck.get('process')} was checked again, and the last of {len(pairs)} was to be"
    ends: Sequence[int] = recheck.get("ends") or []
    if recheck.get("steps") not in ends[:1] or recheck.get("repetitions", 0) < len(set(ends)):
        yield f"{recheck.get('repetitions', 0)} repetitions of {len(set(ends))} timed ends were held against them"


def _differs(name: str, said: float | None, found: float | None) -> Iterator[str]:
    if said is None or found is None or not isclose(said, found, rel_tol=1e-9):
        yield f"{name} is {said}, and the rest of its row gives {found}"
