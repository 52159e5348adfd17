"""A baseline that does not repeat itself, and fails beside itself, blames no candidate after the clock has stopped."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from optexp.equivalence.missed import End
from optexp.records.verification import Finding, broken
from optexp.verification import replay
from optexp.verification.trial import NoYardstick
from optexp.workers.reference import Reference

WRONG = broken("out/output", "is another number")
STRAYED, FAR = (Finding("grad/weight", "G2", False, ("G2",), used=used) for used in (1.01, 2.5))


class Scripted:
    """An arm, or a reference whose judgements are given in their order; without these it finds nothing wrong."""

    def __init__(self, *judgements: list[Finding]) -> None:
        self.judgements, self.calls, self.widened = list(judgements), list[str](), 0

    def call(self, method: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls.append(method.__name__)
        self.widened += method is Reference.yardstick and self.calls[-2:-1] == ["judge"]
        if method is Reference.info:
            return SimpleNamespace(noisy_steps=0, reassociated_runs=0, keeps=True)
        if method in (Reference.judge, Reference.judge_again):
            return self.judgements.pop(0) if self.judgements else []
        return None


def judged(reference: Scripted, steady: bool, monkeypatch: pytest.MonkeyPatch) -> list[Finding]:
    monkeypatch.setattr(replay, "convey", lambda *_: None)
    return replay.Replay(cast(Any, reference), cast(Any, Scripted()), End(3)).judged(cast(Any, Scripted()), steady)


def test_one_that_fails_beside_itself_is_no_yardstick(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NoYardstick, match="does not pass beside itself") as caught:
        judged(Scripted([WRONG], [WRONG], [], [WRONG]), False, monkeypatch)
    assert caught.value.type == "NoReference"


def test_one_that_strays_a_little_is_a_measure_and_the_candidate_is_judged_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reference = Scripted([WRONG], [WRONG], [], [STRAYED], [], [], [], [])
    assert judged(reference, False, monkeypatch) == []
    assert reference.widened == 1


@pytest.mark.parametrize("wrong", [[[STRAYED], [STRAYED]], [[FAR]], [[], [WRONG]]])
def test_one_that_strays_far_or_again_is_no_yardstick(
    wrong: list[list[Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(NoYardstick):
        judged(Scripted([WRONG], [WRONG], *wrong), False, monkeypatch)


@pytest.mark.parametrize("steady", [True, False])
def test_one_that_passes_beside_itself_blames_the_candidate(steady: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Scripted([WRONG], [WRONG])
    assert judged(reference, steady, monkeypatch) == [WRONG]
    assert reference.calls.count("judge_again") == 1
    assert reference.calls.count("judge") == (1 if steady else 6)


def test_a_candidate_that_passes_needs_no_further_runs_of_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    reference = Scripted()
    assert judged(reference, True, monkeypatch) == []
    assert reference.calls.count("yardstick") == reference.calls.count("judge") == 1
    assert "judge_again" not in reference.calls
