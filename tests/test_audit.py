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
from typing import Any

import pytest

from optexp import audit
from optexp.audit import derived, problems
from optexp.measurement import statistics, table
from optexp.measurement.sampling import SAME
from optexp.result import Result, Speedup, Verdict, digest
from optexp.wording import at_least
from tests.measurement.samples import constant, made

Record = dict[str, Any]

PAIRS = [[[2.0 + 0.01 * i, 1.0 + 0.001 * j] for i in range(12)] for j in range(5)]
TENSOR = {"ok": True, "used": 0.4, "gate": "G1"}
EQUIVALENCE = {
    "ok": True, "seeds": [1, 2], "reference": "fp64 on cpu", "families": ["normal"], "failures": [],
    "gates": {"G1": {"passed": True, "worst_ratio": 1.0}}, "tensors": {"output": TENSOR},
    "mutants": {"scaled": {"tried": 1, "caught": 1, "passed": []}}, "recheck": {"steps": 30, "ok": True},
}  # fmt: skip


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """FASTER, as a comparison writes it."""
    interval = statistics.interval([[log(b / c) for b, c in process] for process in PAIRS], 0.99)
    low = at_least(interval.ratios()[1])
    result = Result(
        Verdict.FASTER, f"FASTER, at least {low}× (...)", "mlp", ["amp"], "cpu", 0,
        speedup=Speedup(*interval.ratios(), 0.99, 5), equivalence=copy.deepcopy(EQUIVALENCE),
        measurement={"pairs": PAIRS, "min_effect": 0.01, "watchdogs": [{"name": "drift", "ok": True, "fatal": False}]},
        evidence=[{"strategy": "amp", "engaged": True, "text": ""}],
    )  # fmt: skip
    result.write(tmp_path / "result.json")
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
        record[last] = value

    return edit


EDITS: dict[str, tuple[Callable[[Record], None], str]] = {
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
    "surer than it was": (set_in("config", {"measurement.confidence": 0.999}), "0.999 was asked for"),
    "another effect": (set_in("config", {"measurement.min_effect": 0.05}), "0.05 was asked for"),
    "more processes": (set_in("speedup/processes", 15), "pairs of 5 listed"),
    "not rechecked": (set_in("equivalence/recheck", {}), "not checked again"),
    "not engaged": (set_in("evidence", [{"engaged": False}]), "the record gives NOT_ENGAGED"),
    "untrusted": (set_in("measurement/watchdogs", [{"ok": False, "fatal": True}]), "the record gives INVALID"),
    "a control failed": (set_in("measurement/controls", {"A/A": {"ok": False}}), "the record gives INVALID"),
    "an error": (set_in("error", {"type": "Crash"}), "the record gives ERROR"),
    "no pairs": (set_in("measurement/pairs", []), "no pairs that it comes from"),
    "another claim": (set_in("verdict", "SLOWER"), "the record gives FASTER"),
    "another headline": (set_in("headline", "FASTER, at least 9.99× (...)"), "the interval's low end"),
    "a note": (set_in("workload", "bert"), "the digest does not fit"),
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
    assert list(audit._beside(record, tmp_path)) == []
    record["measurement"]["pairs"][0].pop()
    path = tmp_path / "result.json"
    path.write_text(json.dumps(record))
    assert any("other pairs" in problem for problem in audit._beside(record, tmp_path))
    assert audit.main([str(path)]) == 3


def test_no_speedup_is_shown_without_a_verification_whatever_the_verdict(record: Record) -> None:
    record["verdict"], record["headline"] = "INCONCLUSIVE", "INCONCLUSIVE (best estimate 1.98×)"
    record["equivalence"] = {}
    record["digest"] = digest(record)
    assert any("INCONCLUSIVE without a verification" in problem for problem in problems(record))


def test_the_command(record: Record, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "result.json"
    assert audit.main([str(path)]) == 0
    assert "FASTER, follows from the record (60 pairs, 1 tensors)" in capsys.readouterr().out
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
