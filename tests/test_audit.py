"""A record that was written holds; an edited one does not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from optexp.commands import audit
from optexp.commands.audit import problems
from optexp.comparison.adjudicate import Facts, log_ratios
from optexp.measurement import samples_file, statistics
from optexp.measurement.samples import SAME
from optexp.records import filenames
from optexp.records.measurement import Control, Measurement, Severity, Watch
from optexp.records.verification import Finding, GateResult, Recheck, Verification
from optexp.reporting.wording import headline
from optexp.result import ByItself, Engagement, Result, Speedup, Verdict, digest
from tests.measurement.samples import constant, made

Record = dict[str, Any]

PAIRS = [[(2.0 + 0.01 * i, 1.0 + 0.001 * j) for i in range(12)] for j in range(5)]
CONFIG = {"workload": "mlp", "device": "cpu", "dtype": "float32", "strategy": "amp", "strategy.amp.dtype": "bfloat16"}
CONFIG |= {"baseline": "baseline", "measurement.confidence": 0.99, "measurement.min_effect": 0.01}
ITSELF = {key: value for key, value in CONFIG.items() if key != "strategy.amp.dtype"} | {"baseline": "amp"}
OLD = Path(__file__).parent / "records"


def faster() -> Result:
    """FASTER, as a comparison writes it."""
    found = Verification(
        "PRECISION(bfloat16)", seeds=[1, 2], gates={"G1": GateResult(True, 1.6)}, recheck=Recheck(process=5),
        weakest=Finding("output", weak=True, error_ratio=1.6), tensors={"output": Finding("output", weak=True)},
    )  # fmt: skip
    result = Result(
        Verdict.FASTER, "", "mlp", ["amp"], "cpu", 0, equivalence=found, evidence=[Engagement("amp", True, "")],
        measurement=Measurement(
            "default", 0.01, [Watch("drift", True, "")], {"A/A": Control("same", True, True, "")}, pairs=list(PAIRS)
        ),
        config=dict(CONFIG), environment={"device": "cpu"},
    )  # fmt: skip
    interval = Facts(measurement=result.measurement).interval
    assert interval is not None
    result.speedup = Speedup(*interval.ratios(), confidence=0.99, processes=5)
    result.headline = headline(result, "bfloat16", "baseline", found.weakness)
    return result


def written(result: Result, folder: Path) -> Record:
    result.write(folder / "result.json")
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(result.config)))
    (folder / "environment.json").write_text(json.dumps(result.environment))
    record: Record = json.loads((folder / "result.json").read_text())
    return record


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return written(faster(), tmp_path)


def beside(record: Record, folder: Path) -> list[str]:
    return list(audit.beside(Result.of(record), record, folder))


def test_what_was_written_follows(record: Record) -> None:
    assert problems(record) == []


def set_in(path: str, value: Any) -> Callable[[Record], None]:
    def edit(record: Record) -> None:
        *above, last = path.split("/")
        for key in above:
            record = record[int(key)] if isinstance(record, list) else record[key]
        record[int(last) if isinstance(record, list) else last] = value

    return edit


REFUSED = asdict(Watch("recompilation", False, "torch.compile compiled again", Severity.REFUSES))
UNDECIDED = asdict(Watch("batches", False, "different batches", Severity.UNDECIDES))
EDITS: dict[str, tuple[Callable[[Record], Any], str]] = {
    "larger speedup": (set_in("speedup/low", 3.0), "the pairs give"),
    "no verification": (set_in("equivalence", None), "no verification on fresh inputs"),
    "no seeds": (set_in("equivalence/seeds", []), "no verification on fresh inputs"),
    "a gate failed": (set_in("equivalence/gates/G1/passed", False), "G1 failed"),
    "a tensor failed": (set_in("equivalence/tensors/output/ok", False), "output failed"),
    "not equivalent": (set_in("equivalence/ok", False), "the record gives NOT_EQUIVALENT"),
    "unseen": (set_in("equivalence/unseen", {"output": "too small"}), "the record gives UNVERIFIED"),
    "recheck failed": (set_in("equivalence/recheck/ok", False), "the process after its timing failed"),
    "not rechecked": (set_in("equivalence/recheck", None), "was not checked again"),
    "no evidence": (set_in("evidence", []), "0 proofs of engagement"),
    "not engaged": (set_in("evidence/0/engaged", False), "the record gives NOT_ENGAGED"),
    "surer than it was": (set_in("config/measurement.confidence", 0.999), "0.999 was asked for"),
    "another effect": (set_in("config/measurement.min_effect", 0.05), "0.05 was asked for"),
    "another workload": (set_in("workload", "bert"), "workload is bert, and mlp was asked for"),
    "another device": (set_in("device", "cuda:0"), "the environment's cpu"),
    "another strategy": (set_in("strategy", ["fusion"]), "strategy is fusion, and amp was asked for"),
    "against itself": (set_in("config", ITSELF), "the record gives INVALID"),
    "refused": (set_in("measurement/watchdogs", [REFUSED]), "the record gives INVALID"),
    "undecided": (set_in("measurement/watchdogs", [UNDECIDED]), "the record gives INCONCLUSIVE"),
    "a control failed": (set_in("measurement/controls/A/A/ok", False), "the record gives INVALID"),
    "lost among many": (set_in("measurement/p_holm", 0.02), "the record gives INCONCLUSIVE"),
    "an error": (set_in("error", {"type": "Crash", "message": "x"}), "the record gives ERROR"),
    "no pairs": (set_in("measurement/pairs", []), "no pairs that it comes from"),
    "more processes": (set_in("speedup/processes", 15), "pairs of 5 listed"),
    "another claim": (set_in("verdict", "SLOWER"), "the record gives FASTER"),
    "another headline": (set_in("headline", "FASTER, at least 9×"), "the headline says 'FASTER, at least 9×'"),
    "no weakness": (set_in("equivalence/weakest", None), "the record gives 'FASTER"),
    "a note": (set_in("explanation", ["luck"]), "the digest does not fit"),
}


@pytest.mark.parametrize("name", EDITS)
def test_edits_are_noticed(record: Record, name: str) -> None:
    edit, words = EDITS[name]
    if name == "a control failed":
        record["measurement"]["controls"]["A/A"]["ok"] = False
    else:
        edit(record)
    assert any("digest" in problem for problem in problems(record))
    if name != "a note":
        record["digest"] = digest(record)  # who edits may know of it
        assert any(words in problem for problem in problems(record)), problems(record)
    del record["digest"]
    assert any("no digest" in problem for problem in problems(record))


def test_a_speedup_leaves_with_no_other_verdict(record: Record) -> None:
    record["verdict"], record["headline"] = "INVALID", "INVALID: throttling"
    assert any("a speedup is shown with INVALID" in problem for problem in problems(record))


@pytest.mark.parametrize("comparisons", [12, None])
def test_a_verdict_that_promises_less_is_no_lie(comparisons: int | None, tmp_path: Path) -> None:
    """As after the correction for many comparisons, whose number older records do not hold."""
    result = faster()
    assert result.measurement is not None
    result.by_itself = ByItself(Verdict.FASTER, result.headline)
    result.measurement.p_value = statistics.p_value(log_ratios(result.measurement), 0.01, 0.99)
    result.measurement.p_holm, result.measurement.comparisons = 0.02, comparisons
    alone, result.verdict = result.headline, Verdict.INCONCLUSIVE
    result.headline = f"INCONCLUSIVE: one of 12 comparisons (Holm: p = 0.02), by itself {alone}"
    record = written(result, tmp_path)
    assert problems(record) == []
    edits = {"at least ": "at least 9", "by itself FASTER": "by itself SLOWER"} | ({"12": "2"} if comparisons else {})
    for old, new in edits.items():
        edited = record | {"headline": result.headline.replace(old, new)}
        assert edited["headline"] != result.headline
        assert any(f"the headline says {edited['headline']!r}" in problem for problem in problems(edited))


@pytest.mark.parametrize("cold", [False, True])
def test_the_blocks_beside_the_record_are_its_pairs(cold: bool, tmp_path: Path, record: Record) -> None:
    samples = made(constant(2e-3), constant(1e-3), pairs=12)
    for sample in samples:
        sample.pairs = [replace(p, baseline=replace(p.baseline, device_s=1e-4, cold=cold)) for p in sample.pairs]
        sample.pairs[3] = replace(sample.pairs[3], candidate=replace(sample.pairs[3].candidate, skipped=True))
        sample.pairs.insert(5, replace(sample.pairs[5], kind=SAME))
    samples[1].pairs = [replace(p, candidate=replace(p.candidate, skipped=True)) for p in samples[1].pairs]
    samples_file.write(samples, tmp_path / filenames.SAMPLES)
    pairs = [[[p.baseline.step_s * 1e6, p.candidate.step_s * 1e6] for p in s.kept] for s in samples]
    record["measurement"] |= {"pairs": pairs, "l2": {"headline": "cold" if cold else "warm"}}
    assert beside(record, tmp_path) == []
    record["measurement"]["pairs"][0].pop()
    path = tmp_path / "result.json"
    path.write_text(json.dumps(record))
    assert any("other pairs" in problem for problem in beside(record, tmp_path))
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
    assert beside(record, tmp_path) == []
    path = tmp_path / name
    held = OmegaConf.load(path)
    held[key] = value
    path.write_text(OmegaConf.to_yaml(held) if path.suffix == ".yaml" else json.dumps(OmegaConf.to_container(held)))
    assert beside(record, tmp_path) == [f"{name} beside it says otherwise about {key}"]
    path.unlink()
    assert any(f"(no {name} beside it)" in words for words in audit.underived(Result.of(record), tmp_path))


def test_the_machine_of_a_winner_is_told_where_it_was_measured_again(tmp_path: Path, record: Record) -> None:
    (tmp_path / "winner").mkdir()
    (tmp_path / "winner" / "environment.json").write_text(json.dumps({"device": "cpu", "load": 0.1}))
    record["environment"]["load"] = 0.1
    assert beside(record, tmp_path) == ["environment.json beside it says otherwise about load"]
    record["by_itself"] = {"verdict": "FASTER", "again": "winner"}
    assert beside(record, tmp_path) == []


@pytest.mark.parametrize("path", sorted(OLD.glob("*.json")), ids=lambda path: path.stem)
def test_records_of_schema_1_are_read(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.main([str(path)]) == 0, capsys.readouterr().out


def test_a_folder_stands_for_its_record(tmp_path: Path, record: Record, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "result.json").write_text(json.dumps(record))
    assert audit.main([str(tmp_path)]) == audit.main([str(tmp_path / "result.json")]) == 0
    assert audit.main([str(tmp_path / "none")]) == 1


def test_a_gate_of_an_earlier_record_is_read_by_its_new_name(record: Record) -> None:
    record["equivalence"]["gates"]["DICE"] = {"passed": True, "worst_ratio": None}
    row = next(iter(record["equivalence"]["tensors"].values()))
    row |= {"gate": "DICE", "failed": ["DICE"]}
    found = Result.of(record).equivalence
    assert found
    assert found.gates["RANDOMNESS"].passed
    assert "DICE" not in found.gates
    finding = next(iter(found.tensors.values()))
    assert (finding.gate, finding.failed) == ("RANDOMNESS", ("RANDOMNESS",))
