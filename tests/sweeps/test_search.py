"""A search's findings are corrected for how many there were, and its winner is measured again."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from omegaconf import DictConfig, OmegaConf

from optexp.measurement import statistics
from optexp.records.measurement import Measurement, ProcessSpread
from optexp.records.trials import Search, Trial
from optexp.records.verification import Verification
from optexp.result import ByItself, Problem, Result, Speedup, Verdict
from optexp.sweeps import selection


def result(strategy: str, low: float, p: float = 1e-6, **changes: Any) -> Result:
    verdict = Verdict.FASTER if low > 1.01 else Verdict.INCONCLUSIVE
    made = Result(verdict, f"{verdict} (...)", "mlp", [strategy], "cpu", 0, fingerprint="0")
    made.speedup = Speedup(low * 1.05, low, low * 1.1, 0.99, 5)
    made.measurement = Measurement(p_value=p, pairs=[[(low * 1.05 + 1e-4 * i, 1.0)] * 3 for i in range(5)])
    made.equivalence = Verification("REASSOCIATES")
    made.config = {"measurement.confirm": True}
    return replace(made, **changes)


def test_holm_as_in_its_paper() -> None:
    assert selection.holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert selection.holm([]) == []
    assert selection.holm([0.9, 0.9]) == [1.0, 1.0]


def test_a_claim_among_many_needs_more(monkeypatch: pytest.MonkeyPatch) -> None:
    why = ["The profiled step got faster.", "1 kernel, not 9."]
    tried = [
        result("a", 1.5, 1e-6),
        result("b", 1.02, 0.004, explanation=why),
        *(result(f"n{i}", 0.9, 0.5) for i in range(8)),
    ]
    a, b, *rest = selection.corrected(tried)
    assert a.verdict is Verdict.FASTER
    assert b.verdict is Verdict.INCONCLUSIVE
    assert "one of 10 comparisons" in b.headline
    assert b.measurement is not None
    assert b.measurement.comparisons == 10
    assert b.explanation == why[1:]
    assert b.by_itself == ByItself(Verdict.FASTER, "FASTER (...)")
    assert a.by_itself is None
    assert {r.verdict for r in rest} == {Verdict.INCONCLUSIVE}
    (alone,) = selection.corrected([result("b", 1.02, 0.004)])
    assert alone.verdict is Verdict.FASTER


def test_a_search_among_other_jobs_answers_for_its_trials_and_is_measured_no_second_time() -> None:
    trials = [Trial(n, ["amp"], [], Verdict.SAME, p_value=0.5, change=f"c{n}") for n in range(8)]
    found = Search("time", [], ["amp"], "Use amp.", "the end", 1.0)
    searched = result("amp", 1.5, 0.004, trials=trials, search=found)
    assert selection.p_value(searched, 0.004) == pytest.approx(9 * 0.004)
    (alone,) = selection.corrected([searched])
    assert alone.verdict is Verdict.INCONCLUSIVE
    sure = {Path("0"): replace(searched, verdict=Verdict.FASTER), Path("1"): result("fusion", 1.2)}
    assert selection.winners(sure) == []
    assert selection.winners({**sure, Path("0"): result("amp", 1.5)}) == [Path("0")]


def test_p_agrees_with_the_interval() -> None:
    random = Random(2)
    for _ in range(200):
        for processes, spread in (
            ([[random.gauss(0.02, 0.006)] for _ in range(5)], None),
            ([[random.gauss(0.015, 0.01) for _ in range(30)]], None),
            ([[random.gauss(random.choice((-0.03, 0.03)), 0.01) for _ in range(30)]], ProcessSpread(0.004, 8)),
        ):
            decided = statistics.decide(statistics.interval(processes, 0.99, spread), 0.01)
            p = statistics.p_value(processes, 0.01, 0.99, spread)
            assert (decided in (Verdict.FASTER, Verdict.SLOWER)) == (p < 0.01)


def test_among_many_equal_arms_one_false_claim_in_a_hundred_searches() -> None:
    random, searches = Random(5), 300

    def claims() -> bool:
        tried = [[[random.gauss(0, 0.02)] for _ in range(5)] for _ in range(10)]
        return min(selection.holm([statistics.p_value(processes, 0.0, 0.99) for processes in tried])) < 0.01

    assert sum(claims() for _ in range(searches)) <= 8


@pytest.fixture
def jobs(tmp_path: Path) -> dict[Path, Result]:
    found = {}
    for name, low in (("amp", 1.2), ("fusion", 1.5), ("inplace", 1.0)):
        (tmp_path / name / ".hydra").mkdir(parents=True)
        OmegaConf.save(OmegaConf.create({"seed": 3, "device": "auto"}), tmp_path / name / ".hydra" / "config.yaml")
        found[tmp_path / name] = result(name, low, device="cuda:1")
    return found


def test_the_winner_is_measured_again_and_that_is_reported(jobs: dict[Path, Result], tmp_path: Path) -> None:
    asked = []

    def run(config: DictConfig, output: Path) -> Result:
        asked.append((config.seed, config.device, output.relative_to(tmp_path)))
        return result("fusion", 1.3)

    found = selection.confirm(jobs, tmp_path, run)
    assert asked == [(1003, "cuda:1", Path("winners/0"))]  # the card that the first was measured on
    again = found[tmp_path / "fusion"]
    assert again.speedup is not None
    assert again.speedup.low == 1.3
    assert "in the search it was 1.5" in again.notes[0]
    assert again.by_itself == ByItself(Verdict.FASTER, "FASTER (...)", "../winners/0")
    assert found[tmp_path / "amp"] is jobs[tmp_path / "amp"]


def test_a_winner_that_fails_its_second_look_shows_no_speedup_of_the_first(
    jobs: dict[Path, Result], tmp_path: Path
) -> None:
    def run(config: DictConfig, output: Path) -> Result:
        return Result(Verdict.NOT_EQUIVALENT, "", "mlp", ["fusion"], "cpu", 1003)

    again = selection.confirm(jobs, tmp_path, run)[tmp_path / "fusion"]
    assert again.by_itself == ByItself(Verdict.FASTER, "", "../winners/0")
    assert "×" not in "".join(again.notes)


def test_whoever_wins_after_that_is_measured_again_too(jobs: dict[Path, Result], tmp_path: Path) -> None:
    """The lucky first falls behind the second, which nobody had measured twice; the third never led."""
    asked = []

    def run(config: DictConfig, output: Path) -> Result:
        asked.append(output.name)
        return result("again", {"0": 1.0, "1": 1.15}[output.name])

    found = selection.confirm(jobs, tmp_path, run)
    assert asked == ["0", "1"]
    assert [found[tmp_path / name].speedup.low for name in ("fusion", "amp", "inplace")] == [1.0, 1.15, 1.0]  # type: ignore[union-attr]


def test_one_that_is_undecided_does_not_stand_before_the_winner(jobs: dict[Path, Result], tmp_path: Path) -> None:
    jobs[tmp_path / "fusion"].verdict = Verdict.INCONCLUSIVE
    assert selection.winners(jobs) == [tmp_path / "amp"]


def test_a_device_that_is_not_here_leaves_the_first_result(jobs: dict[Path, Result], tmp_path: Path) -> None:
    lost = result("fusion", 1.3, verdict=Verdict.ERROR, headline="ERROR: torch sees no CUDA device here")
    winner = selection.confirm(jobs, tmp_path, lambda config, output: lost)[tmp_path / "fusion"]
    assert winner.verdict is Verdict.FASTER
    assert "no CUDA device" in winner.notes[0]


def test_a_winner_that_fails_when_measured_again_is_none(jobs: dict[Path, Result], tmp_path: Path) -> None:
    crash = Problem("Crash", "killed by SIGSEGV", worker="candidate")
    lost = result("fusion", 1.3, verdict=Verdict.ERROR, headline="ERROR: candidate: killed by SIGSEGV", error=crash)
    found = selection.confirm(jobs, tmp_path, lambda config, output: replace(lost, notes=[]))
    assert found[tmp_path / "fusion"].verdict is Verdict.ERROR
    assert found[tmp_path / "fusion"].by_itself.verdict is Verdict.FASTER


def test_baselines_may_be_what_is_compared() -> None:
    """Of the empty stack against many others, too, some differ by chance."""
    several = [replace(result("b", 1.02, 0.004), strategy=[], config={"baseline": f"b{i}"}) for i in range(10)]
    assert {found.verdict for found in selection.corrected(several)} == {Verdict.INCONCLUSIVE}


def test_what_was_not_a_search_has_no_winner(jobs: dict[Path, Result]) -> None:
    amp, fusion, inplace = jobs
    assert selection.winners({amp: jobs[amp]}) == []
    assert selection.winners({**jobs, fusion: replace(jobs[fusion], config={"measurement.confirm": False})}) == []
    equal = {"measurement.confirm": True, "strategy": "baseline", "baseline": "baseline"}
    assert selection.winners({amp: jobs[amp], fusion: replace(jobs[fusion], strategy=[], config=equal)}) == []
    assert selection.winners({inplace: jobs[inplace], amp: jobs[inplace]}) == []
