"""Inputs are other ones in every run, a key repeats them, and a run that repeats them says so."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from optexp.reporting import logged, report
from optexp.result import Result, Verdict
from optexp.support.draws import Draws
from tests.cheats.test_cheats import compare

VERIFY = ["workload=gelu", "workload.size=32", "verify=only", "measurement=quick", "tracking.enabled=false"]
VERIFY += ["device=cpu", "isolation=none", "measurement.profile_steps=2", "profile.details=false"]


@pytest.fixture(autouse=True)
def _entropy(monkeypatch: pytest.MonkeyPatch, _the_same_inputs: None) -> None:
    monkeypatch.setattr("optexp.support.draws.token_hex", secrets.token_hex)


def test_every_run_has_seeds_of_its_own() -> None:
    runs = [Draws.of(None) for _ in range(20)]
    seeds = [run.seed("verification", index) for run in runs for index in range(5)]
    assert len(set(seeds)) == 100
    assert not any(run.replayed for run in runs)


def test_a_key_repeats_them_and_purposes_share_none() -> None:
    first, again = Draws.of("a key"), Draws.of("a key")
    purposes = [("verification", 0), ("verification", 1), ("batches", 0), ("novelty", 0), ("recheck",)]
    assert [first.seed(*purpose) for purpose in purposes] == [again.seed(*purpose) for purpose in purposes]
    assert len({first.seed(*purpose) for purpose in purposes}) == len(purposes)
    assert again.replayed


def run(folder: Path, *overrides: str) -> Result:
    folder.mkdir()
    return compare(folder, [*VERIFY, *overrides], stack="inference_mode")


def test_runs_differ_a_replay_repeats_one_and_says_so(tmp_path: Path) -> None:
    first, second = run(tmp_path / "first"), run(tmp_path / "second")
    assert first.verdict is second.verdict is Verdict.VERIFIED
    assert set(first.equivalence.seeds).isdisjoint(second.equivalence.seeds)
    assert first.fingerprint == second.fingerprint
    assert not first.draws.replayed
    assert "optexp.replay" not in logged.tags(first)

    key = first.draws.key
    again = run(tmp_path / "again", f"replay={key}")
    assert again.equivalence.seeds == first.equivalence.seeds
    assert again.fingerprint == first.fingerprint
    assert again.draws == Draws(key, replayed=True)
    assert again.config["replay"] == key
    assert again.headline == f"{first.headline}; a replay, on inputs of an earlier run"
    assert logged.tags(again)["optexp.replay"] == key
    assert "a replay, on inputs of an earlier run" in report.render(again)
    assert Result.read(tmp_path / "again" / "result.json").draws.replayed
