"""Jobs that share a card: one of them is timed at a time, and all others stand still meanwhile."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from threading import Thread

import pytest
import torch

from optexp import api
from optexp.comparison import runner, shared_card, visible_cards
from optexp.comparison.quiet import Shared, Unshared
from optexp.equivalence import judge
from optexp.equivalence.fp64_reference import Fp64Reference
from optexp.judging import crew, line, problem_files
from optexp.judging.job import Job, Settings
from optexp.judging.line import Line, failed
from optexp.judging.problem_files import Target
from optexp.records.verdict import Verdict
from optexp.support import file_lock
from optexp.workers import arm_setup
from tests.judging.suites import RIGHT, SUM, files


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A folder into which workers write when they work, and when they are timed."""
    monkeypatch.setattr(crew, "MODULE", "tests.judging.stand_in")
    monkeypatch.setenv("STAND_IN", str(tmp_path))
    monkeypatch.setattr(file_lock, "FOLDER", tmp_path)
    return tmp_path


def jobs(*problems: str) -> list[Job]:
    return [Job(f"{index} {problem}", "files", problem, "") for index, problem in enumerate(problems)]


def judged(*problems: str, at_once: int, limit_s: float = 30.0) -> dict[str, Line]:
    found: dict[str, Line] = {}
    settings = Settings(limit_s=limit_s, at_once=at_once)
    crew.judge_all(jobs(*problems), settings, ["0"], lambda line: found.update({line.key: line}))
    return found


def test_one_job_is_timed_at_a_time_and_the_others_stand_still(stand_in: Path) -> None:
    found = judged(*["times itself"] * 4, at_once=2)
    assert [line.verdict for line in found.values()] == [Verdict.VERIFIED] * 4
    timed = [json.loads(text) for file in stand_in.glob("*.timed") for text in file.read_text().splitlines()]
    worked = [json.loads(text) for file in stand_in.glob("*.worked") for text in file.read_text().splitlines()]
    assert len({pid for pid, *_ in timed}) == 2
    for pid, begin, end in timed:
        others = [at for other, at in worked if other != pid and begin < at < end]
        assert not others, "another job worked meanwhile"


def test_a_job_that_ends_while_it_is_timed_lets_the_others_go_on(stand_in: Path) -> None:
    found = judged("crashes when timed", "times itself", "times itself", at_once=2)
    assert [found[key].verdict for key in sorted(found)] == [Verdict.ERROR, Verdict.VERIFIED, Verdict.VERIFIED]


def test_the_limit_of_a_job_does_not_count_what_others_take(stand_in: Path) -> None:
    found = judged("is timed for long", "works for long", at_once=2, limit_s=1.8)  # 1 s each, besides starting
    assert [line.verdict for line in found.values()] == [Verdict.VERIFIED] * 2


def test_what_others_may_have_spoilt_is_judged_again_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[list[str], int]] = []

    def judge(jobs: list[Job], settings: Settings, places: list[tuple[str, object]], done: object) -> None:
        asked.append(([job.problem for job in jobs], len(places)))
        for job in jobs:
            line = failed(job, settings, "", 1.0)
            if len(places) == 1:
                line = replace(line, verdict=Verdict.VERIFIED)
            elif job.problem == "large":
                line = replace(line, error="OutOfMemoryError")
            elif job.problem == "slow":
                line = replace(line, error="Timeout", blame="reference")
            elif job.problem == "hangs":
                line = replace(line, error="Timeout", blame="candidate")
            elif job.problem == "disturbed":
                line = replace(line, verdict=Verdict.INVALID)
            done(job, line)  # type: ignore[operator]

    monkeypatch.setattr(crew, "_judge", judge)
    found, later = list[Line](), list[str]()
    asked_for = jobs("right", "large", "slow", "hangs", "disturbed")
    crew.judge_all(asked_for, Settings(at_once=3), ["7"], found.append, lambda line, reason: later.append(reason))
    assert [reason.partition(":")[0] for reason in later] == ["ERROR", "ERROR", "INVALID"]
    assert asked == [([job.problem for job in asked_for], 3), (["large", "slow", "disturbed"], 1)]
    assert [(line.problem, line.verdict) for line in found] == [
        ("right", Verdict.ERROR),
        ("hangs", Verdict.ERROR),
        ("large", Verdict.VERIFIED),
        ("slow", Verdict.VERIFIED),
        ("disturbed", Verdict.VERIFIED),
    ]


def test_arms_and_reference_plan_with_their_share_of_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[int] = []

    def planned(device: object, sizes: object, sharing: int, at_least: int) -> int:
        seen.append(sharing)
        return 0

    for module in (arm_setup, judge):
        monkeypatch.setattr(module, "choose_on", planned)
    asked = ["workload=softmax", "workload.rows=8", "workload.columns=16", "device=cpu", "isolation=none"]
    asked += ["verify=only", "measurement=quick", "tracking.enabled=false", "profile.details=false"]
    quiet = Unshared()
    quiet.sharing = 3
    result = runner.run(api.compose(asked, {"fusion": {}}, {}), tmp_path, show=lambda *_: None, quiet=quiet)
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert len(seen) > 4
    assert set(seen) == {3}


def test_who_runs_out_of_memory_beside_others_is_left_to_be_judged_alone(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Neither with less memory nor with fp64 on the host: that would take longer than all others."""
    tried: list[int] = []

    def step(self: Fp64Reference, *_: object) -> None:
        tried.append(1)
        self.device = torch.device("meta")  # anything but the CPU
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 6.00 GiB")

    monkeypatch.setattr(Fp64Reference, "step", step)
    asked = ["workload=softmax", "workload.rows=8", "workload.columns=16", "device=cpu", "isolation=none"]
    asked += ["verify=only", "measurement=quick", "tracking.enabled=false", "profile.details=false"]
    quiet = Unshared()
    quiet.sharing, quiet.again_alone = 3, True
    result = runner.run(api.compose(asked, {"fusion": {}}, {}), tmp_path, show=lambda *_: None, quiet=quiet)
    assert (result.verdict, len(tried)) == (Verdict.ERROR, 1)
    assert result.error is not None
    assert crew.spoilt(line.of(Job("key", "files", "large", ""), Settings(), result, 1.0, None))


def test_two_suites_do_not_share_a_card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(file_lock, "FOLDER", tmp_path)
    monkeypatch.setattr(shared_card, "POLL_S", 0.01)
    order: list[str] = []

    def second() -> None:
        with shared_card.claimed("0"):
            order.append("second")

    with shared_card.claimed("0"):
        waiting = Thread(target=second)
        waiting.start()
        with shared_card.claimed("1"):  # another card
            time.sleep(0.1)
        order.append("first")
    waiting.join()
    assert order == ["first", "second"]


def test_a_process_that_is_no_worker_is_not_heard() -> None:
    card = shared_card.SharedCard()
    with pytest.raises(SystemExit, match="has ended"):
        Shared(card.address, 2).begin()
    card.pids.add(os.getpid())
    worker = Shared(card.address, 2)
    worker.begin()
    worker.begin()  # it has it
    worker.end()
    card.close()
    with pytest.raises(ConnectionRefusedError):
        Shared(card.address, 2)


def test_the_clock_of_a_job_stands_still_while_it_waits_or_is_paused() -> None:
    card, (timed, waiting) = shared_card.SharedCard(), (2**22 + 1, 2**22 + 2)  # no process has such an id
    card.pids |= {timed, waiting}
    began = card.clock(waiting)
    assert card._begin(timed)
    time.sleep(0.05)
    assert card.clock(waiting) - began < 0.04, "it is paused now"
    asks = Thread(target=card._begin, args=(waiting,))
    asks.start()
    time.sleep(0.05)
    card._end(timed)
    asks.join()
    assert 0 <= card.clock(waiting) - began < 0.04, "a wait while it was paused counts once"
    time.sleep(0.05)
    assert card.clock(waiting) - began > 0.04
    card._end(waiting)
    card.close()


@pytest.mark.parametrize(
    ("cards", "cores", "expected"), [([None], 64, 1), (["0"], 16, 4), (["0"], 6, 1), (["0", "1"], 16, 2)]
)
def test_as_many_jobs_on_a_card_as_the_host_can_feed(
    cards: list[str | None], cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    assert visible_cards.at_once(cards) == expected


@pytest.mark.slow
def test_timed_jobs_share_a_machine(tmp_path: Path) -> None:
    files(tmp_path, **{f"suite__{name}": SUM for name in "abc"}, **{f"mine__{name}": RIGHT for name in "abc"})
    short = ["measurement.pairs=10", "measurement.process_s=0.5", "measurement.warmup_s=0.5"]
    settings = Settings("quick", device="cpu", overrides=short, at_once=2)
    suite = problem_files.suite(Target(tmp_path / "suite"), Target(tmp_path / "mine"), settings)
    found: list[Line] = []
    crew.judge_all(suite.jobs, settings, ["0"], found.append)
    assert len(found) == 3
    assert all(line.verdict.measured for line in found), [line.reason for line in found]
    assert any(line.phases.get("wait") for line in found)
