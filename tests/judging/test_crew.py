"""Worker processes: one job's end is no other's."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from optexp.comparison import visible_cards
from optexp.judging import crew
from optexp.judging.job import Job, Settings
from optexp.judging.line import Line
from optexp.records.verdict import Verdict


@pytest.fixture(autouse=True)
def _stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(crew, "MODULE", "tests.judging.stand_in")


def jobs(*problems: str) -> list[Job]:
    return [Job(f"{index} {problem}", "files", problem, "") for index, problem in enumerate(problems)]


def judged(*problems: str, limit_s: float = 30.0, cards: tuple[str | None, ...] = (None,)) -> dict[str, Line]:
    found: dict[str, Line] = {}
    crew.judge_all(jobs(*problems), Settings(limit_s=limit_s), cards, lambda line: found.update({line.key: line}))
    return found


def test_a_job_that_crashes_or_hangs_stops_no_other() -> None:
    found = judged("right", "crashes", "right", "hangs", "right", limit_s=1.0)
    assert [found[f"{index} right"].verdict for index in (0, 2, 4)] == [Verdict.VERIFIED] * 3
    assert found["1 crashes"].verdict is Verdict.ERROR
    assert found["1 crashes"].reason == "the process that compares ended (killed by SIGSEGV): the last words"
    assert found["3 hangs"].reason == "no verdict within 1 s: the job was ended"


def test_lines_of_a_candidate_are_no_answers() -> None:
    found = judged("forges", "right", "forges", "right")
    verdicts = [found[key].verdict for key in sorted(found)]
    assert verdicts == [Verdict.NOT_EQUIVALENT, Verdict.VERIFIED] * 2


def test_each_worker_sees_its_card() -> None:
    found = judged(*["right"] * 8, cards=("0", "GPU-2"))
    assert {line.reason for line in found.values()} <= {"default on 0", "default on GPU-2"}
    assert len(found) == 8


def test_an_interruption_ends_every_worker() -> None:
    began = time.monotonic()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell runs these tests aside
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        judged("hangs", "hangs")
    signal.signal(signal.SIGINT, before)
    assert time.monotonic() - began < 20


@pytest.mark.parametrize(
    ("device", "visible", "expected"),
    [("cpu", "0,1", [None]), ("auto", "0, GPU-3", ["0", "GPU-3"]), ("auto", "", [None]), ("cuda", "2", ["2"])],
)
def test_a_worker_for_each_visible_card(
    device: str, visible: str, expected: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_cards.cards(device) == expected


def test_cards_are_counted_by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for count, expected in ((0, [None]), (2, ["0", "1"])):
        monkeypatch.setattr(visible_cards, "_count", lambda count=count: count)
        assert visible_cards.cards("auto") == expected
