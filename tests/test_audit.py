"""A record that was written holds, an edited one does not, however careful the edit."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from math import log
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from omegaconf import OmegaConf

from optexp import audit
from optexp.audit import derived, problems
from optexp.equivalence.gates import TOLERANCES
from optexp.measurement import statistics, table
from optexp.measurement.controls import NAMES
from optexp.measurement.samples import SAME
from optexp.measurement.watchdogs import DROPPED, FOREIGN, WATCHDOGS
from optexp.reporting.wording import at_least, ratio
from optexp.result import ArmSummary, Result, Speedup, Verdict, digest
from optexp.verification.verify import SAME_BATCHES
from tests.measurement.samples import constant, made

Record = dict[str, Any]

PAIRS = [[[2.0 + 0.01 * i, 1.0 + 0.001 * j] for i in range(12)] for j in range(5)]
ROW = TOLERANCES["bfloat16"]
LIMIT, PEAK = 3 * 0.01 + ROW.floor * ROW.unit * 2.0, 0.2
TENSOR = {
    "ok": True, "weak": True, "bitwise": False, "gate": "G1", "used": 0.016 / LIMIT, "error_rms": 0.016,
    "baseline_rms": 0.01, "yardstick_rms": 0.01, "error_ratio": 1.6, "max_ratio": 0.5, "block_ratio": None,
    "allowed": {"G1": [0.016, LIMIT], "G2": [0.02, PEAK], "CAP": [0.016, 32 * ROW.unit * 2.0]},
    "scale": 2.0, "resolution": 0.0, "visible": [LIMIT / 2, PEAK / 2],
    "element": {"candidate": 3.05, "reference": 3.0},
}  # fmt: skip
EQUIVALENCE = {
    "ok": True, "seeds": [1, 2], "reference": "fp64 on cpu", "families": ["normal", "small"], "failures": [],
    "gates": {gate: {"passed": True, "worst_ratio": 1.6} for gate in ("G0", "G1", "G2", "G3", "CAP")},
    "tensors": {"output": TENSOR}, "worst": {"tensor": "output", **TENSOR}, "bitwise": False, "tails": [],
    "mutants": {name: {"tried": 1, "caught": 1, "passed": []} for name in ("scaled", "one element off")},
    "contract": "PRECISION(bfloat16)", "visible": {"output": TENSOR["visible"]}, "trajectory": {}, "randomness": {},
    "weakest": {"tensor": "output", "error_ratio": 1.6}, "notes": [],
    "recheck": {"process": 5, "steps": 30, "ends": [30, 7], "repetitions": 2, "fresh inputs": True, "ok": True},
    "headline": "output agrees with fp64; 2 fresh input sets and 1 other family of inputs",
}  # fmt: skip
RANDOM = {"seeds": 64, "tests": 100, "smallest_p": 1e-3}
CONFIG = {"workload": "mlp", "device": "cpu", "dtype": "float32", "strategy": "amp", "strategy.amp.dtype": "bfloat16"}
CONFIG |= {"baseline": "baseline", "measurement.l2": "warm", "measurement.controls": True, "seed": 0}
CONFIG |= {"measurement.verification_seeds": 2, "measurement.thorough": True, "workload.mode": "forward"}
CONTROLS = {name: {"ok": True} for name in ("A/A", "known delay")}


def watches(**failed: bool) -> list[Record]:
    """All of them; those that failed by name, and whether they refuse the measurement."""
    return [{"name": n, "ok": n not in failed, "fatal": failed.get(n, False), "text": ""} for n in audit.WATCHDOGS]


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """FASTER, as a comparison writes it."""
    ratios = [[log(b / c) for b, c in process] for process in PAIRS]
    estimate, low, high = statistics.interval(ratios, 0.99).ratios()
    basis = f"best estimate {ratio(estimate)}, 99% interval {at_least(low)} to {high:.3g}, 5 processes"
    weaker = "equivalent, but weaker: output has 1.60× its error"
    times = [median(median(pair[place] for pair in process) for process in PAIRS) for place in (0, 1)]
    arms = [ArmSummary(step_us=t, throughput=32e6 / t, setup_s=2.0, peak_mib=7.0, power_w=3.0) for t in times]
    for arm, t in zip(arms, times, strict=True):
        arm.load_us = 1.1 * t
        arm.energy_j = 3.0 * arm.load_us / 1e6
    result = Result(
        Verdict.FASTER, f"FASTER, at least {at_least(low)}× ({basis}), at bfloat16 precision; {weaker}",
        "mlp", ["amp"], "cpu", 0, Speedup(estimate, low, high, 0.99, 5), *arms, copy.deepcopy(EQUIVALENCE),
        measurement={
            "pairs": PAIRS, "min_effect": 0.01, "watchdogs": watches(), "controls": CONTROLS,
            "processes": [{"log_ratio": median(process), "pairs": 12} for process in ratios],
            "p_value": statistics.p_value(ratios, 0.01), "dropped": [[] for _ in PAIRS],
            "setups_s": {"baseline": [1.0, 2.0, 4.0], "candidate": [2.0]}, "l2": {"headline": "warm"},
        },
        evidence=[{"strategy": "amp", "engaged": True, "text": ""}], config=CONFIG, environment={"device": "cpu"},
    )  # fmt: skip
    result.write(tmp_path / "result.json")
    (tmp_path / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(CONFIG)))
    (tmp_path / "environment.json").write_text(json.dumps(result.environment))
    written: Record = json.loads((tmp_path / "result.json").read_text())
    return written


def test_what_was_written_follows(record: Record) -> None:
    assert problems(record) == []
    assert derived(record) is Verdict.FASTER


def set_in(path: str, value: Any) -> Callable[[Record], None]:
    def edit(record: Record) -> None:
        *above, last = path.split("/")
        for key in above:
            record = record[int(key)] if isinstance(record, list) else record[key]
        record[int(last) if isinstance(record, list) else last] = value

    return edit


EDITS: dict[str, tuple[Callable[[Record], Any], str]] = {
    "larger speedup": (set_in("speedup/low", 3.0), "the pairs give"),
    "no verification": (set_in("equivalence", {}), "without a verification"),
    "no seeds": (set_in("equivalence/seeds", []), "seeds missing"),
    "a gate failed": (set_in("equivalence/gates/G1/passed", False), "gate G1 failed"),
    "a tensor failed": (set_in("equivalence/tensors/output/used", 7.0), "output is beyond its limit"),
    "a failure": (set_in("equivalence/failures", [{}]), "1 failures"),
    "not equivalent": (set_in("equivalence/ok", False), "the record gives NOT_EQUIVALENT"),
    "no power": (set_in("equivalence/mutants", {}), "no mutant"),
    "recheck failed": (set_in("equivalence/recheck/ok", False), "checked again, and failed"),
    "no evidence": (set_in("evidence", []), "0 of 1 strategies"),
    "surer than it was": (set_in("config", {**CONFIG, "measurement.confidence": 0.999}), "0.999 was asked for"),
    "another effect": (set_in("config", {**CONFIG, "measurement.min_effect": 0.05}), "0.05 was asked for"),
    "another workload": (set_in("workload", "bert"), "workload is bert, and mlp was asked for"),
    "another device": (set_in("device", "cuda:0"), "the environment's cpu"),
    "another strategy": (set_in("strategy", ["fusion"]), "strategy is fusion, and amp was asked for"),
    "a quicker step": (set_in("candidate/step_us", 0.1), "candidate.step_us is 0.1, and the pairs give 1.0"),
    "more throughput": (set_in("candidate/throughput", 1e9), "samples of a step"),
    "less energy": (set_in("candidate/energy_j", 1e-9), "candidate.energy_j"),
    "energy of no time": (set_in("candidate/load_us", None), "candidate.energy_j"),
    "most pairs dropped": (set_in("measurement/dropped", [PAIRS[0]] * 5), "pairs were dropped"),
    "a pair dropped for nothing": (set_in("measurement/dropped", [PAIRS[0][:1]]), "no watchdog says why"),
    "fewer processes": (set_in("config", {**CONFIG, "measurement.processes_min": 9}), "at least 9 were asked for"),
    "warm for cold": (set_in("config", {**CONFIG, "measurement.l2": "cold"}), "caches were warm"),
    "no chance": (set_in("measurement/p_value", None), "p_value"),
    "a control that failed": (
        set_in("measurement/controls", CONTROLS | {"A/A": {"ok": True, "low": 1.4, "high": 1.6}}),
        "control A/A failed",
    ),
    "a quicker start": (set_in("candidate/setup_s", 0.1), "candidate.setup_s is 0.1, and the pairs give 2"),
    "another process": (set_in("measurement/processes/1/log_ratio", 9.0), "log_ratio of a process is 9.0"),
    "fewer pairs named": (set_in("measurement/processes/1/pairs", 3), "pairs of a process is 3"),
    "a process forgotten": (set_in("measurement/processes", []), "0 processes are listed"),
    "nobody watched": (set_in("measurement/watchdogs", []), "watchdogs are missing: slow start"),
    "one watched twice": (set_in("measurement/watchdogs", [*watches(), watches()[0]]), "listed twice"),
    "called a remark": (set_in("measurement/watchdogs", watches(recompilation=False)), "recompilation refuses it"),
    "no controls": (set_in("measurement/controls", {}), "controls were asked for, and there are none"),
    "another contract": (set_in("equivalence/contract", "REASSOCIATES"), "the gates are those of PRECISION"),
    "another precision": (set_in("equivalence/contract", "PRECISION(float16)"), "at float16 precision"),
    "equal bits": (set_in("equivalence/contract", "BITWISE"), "its gate BITWISE is missing"),
    "no weakness": (set_in("equivalence/weakest", {}), "the record gives 'FASTER"),
    "another tensor": (set_in("equivalence/tensors/output", {**TENSOR, "used": 0.1}), "not listed so"),
    "a note on the recheck": (set_in("equivalence/recheck", {"note": "x"}), "not checked again"),
    "against itself": (
        set_in("config", CONFIG | {"baseline": "amp", "baseline.amp.dtype": "bfloat16"}),
        "gives INVALID",
    ),
    "more processes": (set_in("speedup/processes", 15), "pairs of 5 listed"),
    "not rechecked": (set_in("equivalence/recheck", {}), "not checked again"),
    "not engaged": (set_in("evidence", [{"engaged": False}]), "the record gives NOT_ENGAGED"),
    "untrusted": (set_in("measurement/watchdogs", watches(drift=True)), "the record gives INVALID"),
    "a control failed": (set_in("measurement/controls", {"A/A": {"ok": False}}), "the record gives INVALID"),
    "an error": (set_in("error", {"type": "Crash"}), "the record gives ERROR"),
    "no pairs": (set_in("measurement/pairs", []), "no pairs that it comes from"),
    "another claim": (set_in("verdict", "SLOWER"), "the record gives FASTER"),
    "another headline": (
        set_in("headline", "FASTER, at least 9.99× (...)"),
        "the headline says 'FASTER, at least 9",
    ),
    "fewer seeds": (set_in("equivalence/seeds", [1]), "1 fresh input sets are listed, and 2 were asked for"),
    "a seed twice": (set_in("equivalence/seeds", [1, 1]), "1 fresh input sets are listed, and 2 were asked for"),
    "fewer seeds asked": (
        lambda r: (r["config"].update({"measurement.verification_seeds": 1}), r["equivalence"]["seeds"].pop()),
        "1 fresh input sets are listed, and the verification says",
    ),
    "a larger error": (set_in("equivalence/tensors/output/error_rms", 0.03), "error_rms beside G1 is 0.03"),
    "a smaller ratio": (set_in("equivalence/tensors/output/error_ratio", 1.0), "error_ratio is 1.0"),
    "less used": (set_in("equivalence/tensors/output/used", 0.1), "used is 0.1"),
    "another gate nearest": (set_in("equivalence/tensors/output/gate", "G2"), "used of G2"),
    "a smaller peak": (set_in("equivalence/tensors/output/allowed/G2/0", 1e-3), "error of the worst element"),
    "a larger limit": (set_in("equivalence/tensors/output/allowed/G1/1", 1.0), "no row of tolerances"),
    "a smaller one was visible": (set_in("equivalence/tensors/output/visible/0", 1e-9), "visible is 1e-09"),
    "no errors": (set_in("equivalence/tensors/output/allowed", {}), "errors and their limits are missing"),
    "never measured": (set_in("equivalence/tensors/output/error_rms", None), "nothing was measured"),
    "not so weak": (set_in("equivalence/tensors/output/weak", False), "an error of 0.016 is weak"),
    "not the weakest": (set_in("equivalence/weakest/error_ratio", 1.5), "not named as the weakest"),
    "a smaller worst ratio": (set_in("equivalence/gates/G1/worst_ratio", 1.0), "G1 has a worst ratio of 1"),
    "equal to the bit": (set_in("equivalence/bitwise", True), "bits are said to be equal"),
    "all survived": (
        set_in("equivalence/mutants/scaled", {"tried": 1, "caught": 0, "passed": []}),
        "mutant 'scaled': 1 tried, 0 caught, and 0 named",
    ),
    "more caught than tried": (set_in("equivalence/mutants/scaled/caught", 2), "1 tried, 2 caught"),
    "a mutant less": (
        set_in("equivalence/mutants", {"scaled": {"tried": 1, "caught": 1, "passed": []}}),
        "mutants are missing: one element off",
    ),
    "another mutant": (
        set_in("equivalence/mutants/twisted", {"tried": 1, "caught": 1, "passed": []}),
        "there are no mutants twisted",
    ),
    "nothing visible": (set_in("equivalence/visible", {}), "nothing says which errors"),
    "no G3": (lambda r: r["equivalence"]["gates"].pop("G3"), "gates are missing: G3"),
    "no CAP": (lambda r: r["equivalence"]["gates"].pop("CAP"), "gates are missing: CAP"),
    "a gate more": (set_in("equivalence/gates/G9", {"passed": True, "worst_ratio": 1}), "no such gates were asked: G9"),
    "an invented family": (set_in("equivalence/families", ["normal", "odd"]), "no families of inputs odd"),
    "a family more": (set_in("equivalence/families", ["normal", "small", "large"]), "2 other families"),
    "a family less": (set_in("equivalence/families", ["normal"]), "0 other families"),
    "no families": (
        lambda r: r["equivalence"].update(families=["normal"], headline="output agrees; 2 fresh input sets"),
        "were asked for, and there are none",
    ),
    "odd sizes": (set_in("equivalence/tails", ["rows=3"]), "odd sizes are listed"),
    "families not asked": (set_in("config", {**CONFIG, "measurement.thorough": False}), "were not asked for"),
    "strayed": (set_in("equivalence/trajectory", {"steps": 32, "step": 3, "share": 7}), "the loss strays 7"),
    "followed for less": (set_in("equivalence/trajectory", {"steps": 8, "step": 3, "share": 0.1}), "for 8 steps"),
    "not followed": (set_in("config", {**CONFIG, "workload.mode": "train"}), "training was not followed"),
    "other distributions": (set_in("equivalence/randomness", {**RANDOM, "smallest_p": 1e-30}), "distributions differ"),
    "another mask in backward": (
        set_in("equivalence/randomness", {**RANDOM, "slopes_off": 0.3, "slopes_limit": 0.05}),
        "not those of the loss",
    ),
    "no dice": (set_in("equivalence/randomness", RANDOM), "gates are missing: DICE"),
    "no distributions": (
        set_in("equivalence/gates/DICE", {"passed": True, "worst_ratio": None}),
        "their distributions were not compared",
    ),
    "another process again": (set_in("equivalence/recheck/process", 99), "process 99 was checked again"),
    "other ends": (set_in("equivalence/recheck/ends", [7, 9]), "repetitions of 2 timed ends"),
    "not repeated": (set_in("equivalence/recheck/repetitions", 1), "1 repetitions of 2 timed ends"),
    "a note": (set_in("explanation", ["luck"]), "the digest does not fit"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_noticed(record: Record, name: str) -> None:
    edit, words = EDITS[name]
    edit(record)
    assert any("digest" in problem for problem in problems(record))
    record["digest"] = digest(record)  # who edits may know of it
    if name != "a note":
        assert any(words in problem for problem in problems(record)), problems(record)
    del record["digest"]
    assert any("no digest" in problem for problem in problems(record))


def test_a_loader_may_give_fewer_sets_and_steps_may_be_random(record: Record) -> None:
    found = record["equivalence"]
    found["seeds"], found["headline"] = [1], "output agrees; 1 fresh input set and 1 other family of inputs"
    found["notes"] = [SAME_BATCHES]
    found["gates"]["DICE"], found["randomness"] = {"passed": True, "worst_ratio": None}, RANDOM
    record["digest"] = digest(record)
    assert problems(record) == []


def test_a_verdict_that_promises_less_is_no_lie(record: Record) -> None:
    """As after the correction for many comparisons."""
    record["verdict"], record["headline"] = "INCONCLUSIVE", "INCONCLUSIVE: one of 12 comparisons"
    record["digest"] = digest(record)
    assert problems(record) == []


def test_a_claim_that_was_one_of_many_is_derived_as_it_was_corrected(record: Record) -> None:
    p = statistics.p_value([[log(b / c) for b, c in process] for process in PAIRS], 0.01)
    record["measurement"] |= {"p_value": p, "p_holm": 0.02}
    assert derived(record) is Verdict.INCONCLUSIVE
    assert any("the record gives INCONCLUSIVE" in problem for problem in problems(record))
    record["measurement"]["p_holm"] = 5 * p
    assert derived(record) is Verdict.FASTER
    record["measurement"]["p_holm"] = p / 2
    assert any("makes no claim surer" in problem for problem in problems(record))
    record["measurement"]["p_value"] = p + 0.001
    assert any("the pairs give" in problem for problem in problems(record))


@pytest.mark.parametrize("cold", [False, True])
def test_the_blocks_beside_the_record_are_its_pairs(cold: bool, tmp_path: Path, record: Record) -> None:
    samples = made(constant(2e-3), constant(1e-3), pairs=12)
    for sample in samples:
        sample.pairs = [replace(p, baseline=replace(p.baseline, device_s=1e-4, cold=cold)) for p in sample.pairs]
        sample.pairs[3] = replace(sample.pairs[3], candidate=replace(sample.pairs[3].candidate, skipped=True))
        sample.pairs.insert(5, replace(sample.pairs[5], kind=SAME))
    samples[1].pairs = [replace(p, candidate=replace(p.candidate, skipped=True)) for p in samples[1].pairs]
    table.write(samples, tmp_path / table.FILE)
    pairs = [[[p.baseline.step_s * 1e6, p.candidate.step_s * 1e6] for p in s.kept] for s in samples]
    record["measurement"] |= {"pairs": json.loads(json.dumps(pairs)), "l2": {"headline": "cold" if cold else "warm"}}
    record["baseline"]["device_us"] = 100.0
    assert list(audit._beside(record, tmp_path)) == []
    record["baseline"]["device_us"] = 50.0
    assert [p for p in audit._beside(record, tmp_path) if "baseline.device_us is 50.0" in p]
    record["measurement"]["pairs"][0].pop()
    path = tmp_path / "result.json"
    path.write_text(json.dumps(record))
    assert any("other pairs" in problem for problem in audit._beside(record, tmp_path))
    assert audit.main([str(path)]) == 3


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("config.yaml", "workload", "bert"),
        ("config.yaml", "dtype", "bfloat16"),
        ("environment.json", "device", "cuda:0"),
    ],
)
def test_what_lies_beside_it_says_the_same(name: str, key: str, value: str, tmp_path: Path, record: Record) -> None:
    assert list(audit._beside(record, tmp_path)) == []
    path = tmp_path / name
    held = OmegaConf.load(path)
    held[key] = value
    path.write_text(OmegaConf.to_yaml(held) if path.suffix == ".yaml" else json.dumps(OmegaConf.to_container(held)))
    assert list(audit._beside(record, tmp_path)) == [f"{name} beside it says otherwise about {key}"]
    path.unlink()
    assert any(f"(no {name} beside it)" in words for words in audit.underived(record, tmp_path))


def test_the_machine_of_a_winner_is_told_where_it_was_measured_again(tmp_path: Path, record: Record) -> None:
    (tmp_path / "winner").mkdir()
    (tmp_path / "winner" / "environment.json").write_text(json.dumps({"device": "cpu", "load": 0.1}))
    record["environment"]["load"] = 0.1
    assert list(audit._beside(record, tmp_path)) == ["environment.json beside it says otherwise about load"]
    record["by_itself"]["again"] = "winner"
    assert list(audit._beside(record, tmp_path)) == []


def test_what_a_claim_was_by_itself_is_derived_too(record: Record) -> None:
    alone = record["headline"]
    record["verdict"] = "INCONCLUSIVE"
    record["headline"] = f"INCONCLUSIVE: one of 12 comparisons (Holm: p = 0.02), by itself {alone}"
    assert list(audit._headline(record)) == []
    record["headline"] = record["headline"].replace("at least ", "at least 9")
    assert any("the headline says 'FASTER, at least 9" in problem for problem in audit._headline(record))


def test_remarks_and_a_few_dropped_pairs_refuse_nothing(record: Record) -> None:
    record["measurement"]["watchdogs"] = watches(modes=False, throttling=False, drift=False)
    throttling = record["measurement"]["watchdogs"][audit.WATCHDOGS.index("throttling")]
    throttling["text"] = "the GPU was slowed (heat): 6 of 60 pairs dropped; SM clock 1700 MHz"
    assert list(audit._trust(record)) == []
    throttling["text"] = "the GPU was slowed (heat): 7 of 60 pairs dropped; SM clock 1700 MHz"
    assert [p for p in audit._trust(record) if "throttling refuses it" in p]


def test_the_watchdogs_and_controls_that_are_asked_for_are_those_that_there_are() -> None:
    samples = made(constant(2e-3), constant(1e-3))
    assert tuple(watchdog(samples).name for watchdog in WATCHDOGS) == audit.WATCHDOGS
    assert tuple(NAMES.values()) == audit.CONTROLS
    assert FOREIGN in audit.WATCHDOGS
    assert DROPPED == 0.1


def test_no_speedup_is_shown_without_a_verification_whatever_the_verdict(record: Record) -> None:
    record["verdict"], record["headline"] = "INCONCLUSIVE", "INCONCLUSIVE (best estimate 1.98×)"
    record["equivalence"] = {}
    record["digest"] = digest(record)
    assert any("INCONCLUSIVE without a verification" in problem for problem in problems(record))


def test_the_command(record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert audit.main([str(path)]) == 0
    said = capsys.readouterr().out
    assert "FASTER, follows from the record (60 pairs, 1 tensors)" in said
    assert "  not derivable: peak memory, set-up time, energy, what gates, mutants and evidence saw, pairs (no" in said
    assert "config.yaml" not in said
    record["speedup"]["low"] = 3.0
    path.write_text(json.dumps(record))
    assert audit.main([str(path)]) == 3
    assert "does not hold" in capsys.readouterr().out
    assert audit.main([str(tmp_path / "missing.json")]) == 1
    done = subprocess.run([sys.executable, "-m", "optexp.audit", str(path)], capture_output=True, text=True)
    assert done.returncode == 3, done.stderr
    assert subprocess.run([sys.executable, "-m", "optexp.audit"], capture_output=True).returncode == 1


@pytest.mark.parametrize("path", sorted((Path(__file__).parent / "results").glob("*.json")), ids=lambda p: p.stem)
def test_records_of_every_verdict_can_be_read(path: Path) -> None:
    assert all(isinstance(problem, str) for problem in problems(json.loads(path.read_text())))
