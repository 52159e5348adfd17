"""`python -m optexp.judge`: its options, mistakes, lines, table and exit status."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from optexp.commands import judge
from optexp.commands.judge import main
from optexp.errors import ConfigError
from optexp.judging import crew, table
from optexp.judging.fast_p import fast_p
from optexp.judging.job import Job, Settings
from optexp.judging.line import Interval, Line, decoded
from optexp.records.verdict import Verdict
from tests.judging.suites import BROKEN, CRASHING, RIGHT, SUM, WRONG, files

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two problems and their candidates; jobs end as `ENDINGS` says instead of being run."""
    files(tmp_path, suite__1_first=SUM, suite__2_second=SUM, mine__1_first=RIGHT, mine__2_second=WRONG)
    monkeypatch.setattr(crew, "judge_all", judge_all)
    ENDINGS.clear()
    RAN.clear()
    return tmp_path


ENDINGS: dict[str, Verdict] = {}
RAN: list[str] = []


def judge_all(
    jobs: Sequence[Job],
    settings: Settings,
    cards: Sequence[str | None],
    done: Callable[[Line], None],
    put_off: Callable[[Line, str], None],
) -> None:
    for job in jobs:
        RAN.append(job.problem)
        verdict = ENDINGS.get(job.problem, Verdict.FASTER)
        if verdict is Verdict.INVALID:
            put_off(Line(job.key, job.suite, job.problem, job.candidate, verdict, ""), "INVALID: [as] another ran")
        speedup = Interval(1.3, 1.2, 1.4, 0.99, 5) if verdict.measured else None
        done(Line(job.key, job.suite, job.problem, job.candidate, verdict, "because [of it]", speedup=speedup))


def run(folder: Path, *more: str) -> int:
    return main([str(folder / "suite"), str(folder / "mine"), *more])


def test_lines_then_a_table(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    ENDINGS["2_second"] = Verdict.NOT_EQUIVALENT
    assert run(folder) == 3
    shown = capfd.readouterr()
    assert [decoded(text).problem for text in shown.out.splitlines()] == ["1_first", "2_second"]
    assert "1.30×" in shown.err
    assert "because [of it]" in shown.err
    assert "FASTER 1, NOT_EQUIVALENT 1" in shown.err
    assert "fast_1 = 0.5, 1 of 2 problems" in shown.err


def test_a_job_that_others_may_have_spoilt_is_told_with_the_reason(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    ENDINGS["2_second"] = Verdict.INVALID
    run(folder)
    assert "later    0.0 s  2_second" in (shown := capfd.readouterr().err)
    assert "with the card to itself: INVALID: [as] another ran" in shown


@pytest.mark.parametrize(
    ("verdict", "status"),
    [(Verdict.SLOWER, 0), (Verdict.ERROR, 1), (Verdict.UNVERIFIED, 3), (Verdict.UNSUPPORTED, 4)],
)
def test_the_exit_status_is_the_worst_candidates(folder: Path, verdict: Verdict, status: int) -> None:
    ENDINGS["1_first"] = verdict
    assert run(folder) == status


def test_a_later_run_goes_on_with_what_is_missing(folder: Path) -> None:
    ENDINGS["2_second"] = Verdict.ERROR
    into = ["--into", str(folder / "lines.jsonl")]
    assert run(folder, *into) == 1
    assert run(folder, *into) == 1
    assert RAN == ["1_first", "2_second"]
    ENDINGS.clear()
    assert run(folder, *into, "--again", "ERROR") == 0
    assert RAN == ["1_first", "2_second", "2_second"]
    files(folder, mine__1_first=f"{RIGHT}\n")
    run(folder, *into)
    assert RAN[3:] == ["1_first"]  # it is another candidate now


def test_jobs_are_chosen_by_words_of_their_titles(folder: Path) -> None:
    run(folder, "--only", "second")
    assert RAN == ["2_second"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["suite"], "name a suite and its candidates"),
        (["suite", "mine", "--strategy", "fusion"], "name a suite and its candidates"),
        (["nowhere", "mine"], "nowhere: there is no such file or folder"),
        (["suite", "mine", "--only", "third"], "--only third: no job has such a title"),
        (["suite", "mine", "--again", "WORSE"], "--again WORSE: there is no such verdict"),
        (["suite", "--strategy", "amp+fussion"], r"fussion is not a choice (did you mean fusion?"),
    ],
)
def test_a_mistake_is_one_sentence(
    folder: Path,
    words: list[str],
    message: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(folder)
    assert main(words) == 1
    shown = capfd.readouterr().err
    assert message in shown
    assert len(shown.splitlines()) == 1
    assert not RAN


def test_shares_are_written_for_programs(folder: Path) -> None:
    run(folder, "--summary", str(folder / "fast_p.json"))
    found = json.loads((folder / "fast_p.json").read_text())
    assert [(one["p"], one["solved"], one["problems"]) for one in found] == [
        (0, 2, 2),
        (1, 2, 2),
        (1.5, 0, 2),
        (2, 0, 2),
    ]


def test_the_schema_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["--schema"]) == 0
    assert json.loads(capfd.readouterr().out)["$defs"]["Line"]["properties"]["verdict"]


def test_shares_are_said_with_what_is_open() -> None:
    line = Line("k", "files", "1", "c", Verdict.INCONCLUSIVE, "", "sample 0", speedup=Interval(1.1, 0.9, 1.3, 0.99, 5))
    said = table.sentence(next(one for one in fast_p([line, replace(line, problem="2")]) if one.p == 1))
    assert said.startswith("sample 0: fast_1 = 1, 2 of 2 problems; 0 to 2 by the intervals and what is undecided; 95%")


def test_help_needs_no_torch() -> None:
    code = "import sys, optexp.commands.judge; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT).returncode == 0


@pytest.mark.slow
def test_candidates_are_judged_in_processes_of_their_own(tmp_path: Path) -> None:
    files(tmp_path, **{f"suite__{name}": SUM for name in ("1_right", "2_wrong", "3_crashing", "4_broken", "5_last")})
    sources = {"1_right": RIGHT, "2_wrong": WRONG, "3_crashing": CRASHING, "4_broken": BROKEN, "5_last": RIGHT}
    files(tmp_path, **{f"mine__{name}": source for name, source in sources.items()})
    words = ["suite", "mine", "--verify-only", "--preset", "quick", "--device", "cpu", "--into", "lines.jsonl"]
    path = os.pathsep.join([str(CHECKOUT), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", "optexp.judge", *words],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1, done.stderr
    found = [decoded(text) for text in done.stdout.splitlines()]
    assert [line.verdict.value for line in found] == ["VERIFIED", "NOT_EQUIVALENT", "ERROR", "ERROR", "VERIFIED"]
    assert found[2].reason == "candidate: the process ended: killed by SIGSEGV"
    assert "no_such_package" in found[3].reason
    assert (tmp_path / "lines.jsonl").read_text() == done.stdout
    assert {*tmp_path.iterdir()} == {tmp_path / name for name in ("suite", "mine", "lines.jsonl")}  # and nothing else


def test_options_are_settings() -> None:
    words = ["s", "c", "--preset", "quick", "--set", "seed=3", "dtype=float64"]
    assert judge.settings_of(judge.parse(words), [None]) == Settings("quick", overrides=["seed=3", "dtype=float64"])
    assert judge.settings_of(judge.parse([*words, "--at-once", "3"]), ["0"]).at_once == 3
    with pytest.raises(ConfigError, match="on a CPU, where each job is timed on all cores, 1"):
        judge.settings_of(judge.parse([*words, "--at-once", "3"]), [None])
