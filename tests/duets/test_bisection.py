"""A bisection names the commit in ⌈log₂ n⌉ comparisons, goes around what it cannot decide, and says what it knows."""

from __future__ import annotations

import json
from math import ceil, exp, log, log2
from pathlib import Path

import pytest

from optexp.commands import bisect
from optexp.duets import workloads
from optexp.duets.bisection import Bisection, Effort, Side, differing, halved, nearer
from optexp.duets.repository import Commit
from optexp.errors import ConfigError
from optexp.records.measurement import Measurement, Severity, Watch
from optexp.result import Result, Speedup, Verdict
from optexp.workers.home import Homes


def commits(count: int) -> list[Commit]:
    return [Commit(f"{number:040}", f"commit {number}") for number in range(count)]


def found(estimate: float, half_width: float = 0.001, verdict: Verdict | None = None, processes: int = 5) -> Result:
    low, high = (exp(log(estimate) + sign * half_width) for sign in (-1, 1))
    decided = Verdict.SLOWER if high < 0.99 else Verdict.FASTER if low > 1.01 else Verdict.INCONCLUSIVE
    if 0.99 < low < high < 1.01:
        decided = Verdict.SAME
    verdict = verdict or decided
    result = Result(
        verdict, f"{verdict} at {estimate}", "net", [], "cpu", 0, Speedup(estimate, low, high, 0.99, processes)
    )
    result.measurement = Measurement()
    return result


@pytest.mark.parametrize("count", [1, 2, 3, 7, 16, 21])
def test_every_commit_is_found_in_as_many_comparisons_as_the_logarithm_says(count: int) -> None:
    for guilty in range(count):
        asked = list[int]()

        def side(commit: Commit, guilty: int = guilty, asked: list[int] = asked) -> Side:
            asked.append(int(commit.hash))
            return Side.BAD if int(commit.hash) >= guilty else Side.GOOD

        assert [int(commit.hash) for commit in halved(commits(count), side)] == [guilty]
        assert len(asked) <= ceil(log2(count))


def test_what_cannot_be_decided_stays_under_suspicion() -> None:
    def side(commit: Commit) -> Side | None:
        return None if 3 <= int(commit.hash) <= 5 else Side.BAD if int(commit.hash) > 5 else Side.GOOD

    assert [int(commit.hash) for commit in halved(commits(10), side)] == [3, 4, 5, 6]
    assert len(halved(commits(8), lambda commit: None)) == 8


def test_a_commit_is_at_the_end_whose_speed_is_nearer() -> None:
    assert nearer(found(0.92), 0.9) is Side.BAD
    assert nearer(found(0.98), 0.9) is Side.GOOD
    assert nearer(found(0.95, 0.02), 0.9) is None
    assert nearer(found(1.09), 1.1) is Side.BAD
    assert nearer(found(1.01), 1.1) is Side.GOOD
    assert nearer(found(0.92, processes=1, verdict=Verdict.INCONCLUSIVE), 0.9) is None
    busy = found(0.92)
    busy.measurement.watchdogs = [Watch("work ahead", False, "busy", Severity.UNDECIDES)]
    assert nearer(busy, 0.9) is None
    assert differing(found(0.9)) is differing(found(1.1)) is Side.BAD
    assert differing(found(1.0)) is Side.GOOD
    refused = Result(Verdict.INVALID, "INVALID: hot", "net", [], "cpu", 0)
    assert nearer(refused, 0.9) is differing(refused) is None


def test_an_open_comparison_is_repeated_with_more_processes() -> None:
    efforts = list[tuple[str, Effort]]()

    def measure(commit: Commit, effort: Effort) -> Result:
        efforts.append((commit.subject, effort))
        return found(0.9 if int(commit.hash) >= 1 else 1.0, half_width=0.22 / effort.times**2)

    search = Bisection(commits(2), measure, lambda tried: None)
    search.run()
    assert [commit.subject for commit in search.suspects] == ["commit 1"]
    assert [(tried.rounds, tried.side) for tried in search.tried] == [(2, Side.BAD), (3, Side.GOOD)]
    assert [effort.times for _, effort in efforts] == [1, 2, 1, 2, 4]
    assert efforts[-1][1].half_width == pytest.approx(-log(0.9) / 4)
    assert efforts[0][1].half_width is None


def test_a_commit_between_both_speeds_is_repeated_and_one_that_cannot_be_measured_is_not() -> None:
    def measure(commit: Commit, effort: Effort) -> Result:
        if commit.subject == "commit 1":
            return Result(Verdict.ERROR, "ERROR: no such file", "net", [], "cpu", 0)
        return found(0.8 if commit.subject == "commit 2" else 0.9, half_width=0.04)

    search = Bisection(commits(3), measure, lambda tried: None)
    search.run()
    assert [(tried.commit.subject, tried.side, tried.rounds) for tried in search.tried] == [
        ("commit 2", Side.BAD, 1),
        ("commit 0", None, 3),  # SLOWER, and its interval holds the middle
        ("commit 1", None, 1),
    ]
    assert bisect.conclusion(search).startswith("one of 000000000, 000000000, 000000000 changed the speed")


def test_equal_ends_name_nothing() -> None:
    search = Bisection(commits(4), lambda commit, effort: found(1.0), lambda tried: None)
    search.run()
    assert (len(search.tried), list(search.suspects)) == (1, [])
    assert bisect.conclusion(search).startswith("no commit to name: the ends are not known to differ: SAME")


def test_more_processes_and_an_interval_that_is_narrow_enough() -> None:
    one, several = (workloads.experiment_of([f"measurement={preset}"]) for preset in ("quick", "default"))
    assert one.measurement.controls
    with pytest.raises(ConfigError, match="textbook decides nothing"):
        workloads.experiment_of(["measurement=textbook"])
    asked = workloads.with_effort(several, 2, 0.02).measurement
    assert (asked.processes_min, asked.processes_max, asked.budget_s, asked.half_width) == (10, 30, 40.0, 0.02)
    assert workloads.with_effort(one, 2, None).measurement.processes_min == 5
    assert workloads.with_effort(several, 1, 0.001).measurement == several.measurement


def test_the_command(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Its commits are those of the repository; only the measurement is a stand-in, which reads their files."""

    def duet(experiment: object, device: str, homes: Homes, *rest: object, verified: bool) -> Result:
        assert not verified
        waits = [
            float((each.folder / "part.py").read_text().split()[3][:-1]) for each in (homes.baseline, homes.candidate)
        ]
        return found(waits[0] / waits[1])

    monkeypatch.setattr(workloads, "duet", duet)
    file = tmp_path / "found.json"
    asked = ["--good", "HEAD~2", "workload=module", "workload.path=net.py", "--json", str(file)]
    assert bisect.main([*asked, "--bad", "HEAD~1"]) == 0
    said = capsys.readouterr().out
    assert "changed the speed: slower (0 commits compared between the ends)" in said
    record = json.loads(file.read_text())
    assert [row["subject"] for row in record["tried"]] == ["slower"]
    assert record["tried"][0]["speedup"]["estimate"] == 0.05
    assert bisect.main([*asked, "--bad", "HEAD"]) == 3
    assert "no commit to name" in capsys.readouterr().out
    assert bisect.main(["--good", "HEAD", "--bad", "HEAD~1", *asked[2:4]]) == 1
    assert bisect.main(["--good", "HEAD", "--bad", "HEAD", "strategy=amp"]) == 1
    assert "strategy= is for one version" in capsys.readouterr().err
