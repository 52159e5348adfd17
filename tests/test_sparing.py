"""Where memory runs out, a comparison begins anew with less of it, and says what was tried."""

from pathlib import Path

import pytest

from optexp import api
from optexp.comparison import runner
from optexp.comparison.modes import compare
from optexp.comparison.session import Session
from optexp.errors import Failure
from optexp.result import Result, Verdict
from optexp.support.memory_plan import LEAST, PLANS


def run(tmp_path: Path, *overrides: str) -> Result:
    job = ["workload=gelu", "workload.size=64", "isolation=none", "device=cpu", "verify=only", "measurement=quick"]
    return runner.run(api.compose([*job, *overrides, "tracking.enabled=false"], {}, {}), tmp_path, show=lambda *_: None)


def short_of(monkeypatch: pytest.MonkeyPatch, plans: int) -> list[int]:
    """Memory runs out with so many of the plans; which were tried."""
    plain, tried = compare.compare_once, list[int]()

    def compare_once(session: Session, *rest: object) -> None:
        tried.append(session.plan)
        if len(tried) <= plans:
            raise Failure("OutOfMemoryError", "CUDA out of memory. Tried to allocate 6.00 GiB", worker="candidate")
        plain(session, *rest)

    monkeypatch.setattr(compare, "compare_once", compare_once)
    return tried


@pytest.mark.parametrize("plans", [1, 2])
def test_a_thriftier_plan_follows_and_reaches_a_verdict(
    plans: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = short_of(monkeypatch, plans)
    result = run(tmp_path)
    assert result.verdict is Verdict.VERIFIED, result.headline
    assert tried == [0, LEAST, LEAST + 1][: plans + 1]
    notes = result.notes
    assert f"memory: candidate ran out with {PLANS[0].describe()}" in notes
    assert any(note.endswith(PLANS[tried[-1]].describe()) for note in notes)
    assert any("with one distinct batch" in note for note in notes)


def test_the_last_failure_says_what_was_tried_and_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    short_of(monkeypatch, 9)
    result = run(tmp_path)
    assert result.verdict is Verdict.ERROR
    assert "Tried to allocate 6.00 GiB" in result.headline
    assert PLANS[0].describe() in result.headline
    assert PLANS[LEAST].describe() in result.headline
    assert "use smaller inputs" in result.headline


def test_another_failure_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def compare_once(session: Session, *_: object) -> None:
        calls.append(session.plan)
        raise Failure("RuntimeError", "no", worker="candidate")

    monkeypatch.setattr(compare, "compare_once", compare_once)
    assert run(tmp_path).verdict is Verdict.ERROR
    assert calls == [0]


def test_small_batches_leave_no_note(tmp_path: Path) -> None:
    notes = run(tmp_path).notes
    assert not [note for note in notes if note.startswith("memory")]
