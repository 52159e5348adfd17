"""The baseline makes a run while the reference works on the one before; large ones take turns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import Mock

import pytest

from optexp.errors import Failure
from optexp.verification import trial
from optexp.verification.trial import SIDE_BY_SIDE, orders, take_yardsticks
from optexp.workers.client import Pending
from optexp.workers.messages import Look
from optexp.workers.transfer import Transfer


@dataclass
class Recorded:
    """A client that writes down what it is asked, and when its answer is taken."""

    name: str
    log: list[str]
    size: int = 1
    fails_at: int | None = None
    asked: int = field(default=0)

    def call(self, method: Any, *args: Any, **kwargs: Any) -> Transfer:
        if self.asked == self.fails_at:
            raise Failure("ValueError", "of the third run")
        self.asked += 1
        self.log.append(f"run {self.asked}")
        return Transfer("", b"", self.size, ())

    def start(self, method: Any, *args: Any, **kwargs: Any) -> Pending[None]:
        self.asked += 1
        number = self.asked
        self.log.append(f"work {number}")
        return Pending(lambda: self.log.append(f"done {number}"))


def order_of_work(monkeypatch: pytest.MonkeyPatch, size: int, fails_at: int | None = None) -> list[str]:
    log: list[str] = []
    monkeypatch.setattr(trial, "convey", lambda *_: log.append("convey"))
    arm, reference = Recorded("arm", log, size, fails_at), Recorded("reference", log)
    looks = [Look(0, noise=noise) for noise in (1, 2, 3)]
    try:
        take_yardsticks(looks, arm, reference)  # type: ignore[arg-type]
    except Failure:
        log.append("failed")
    return log


def test_a_run_is_made_while_the_one_before_is_worked_on(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = ["run 1", "convey", "work 1"], ["run 2", "done 1", "convey", "work 2"]
    assert order_of_work(monkeypatch, 1) == [*first, *second, "run 3", "done 2", "convey", "work 3", "done 3"]


def test_large_runs_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    log = order_of_work(monkeypatch, SIDE_BY_SIDE + 1)
    assert log == [word for n in (1, 2, 3) for word in (f"run {n}", "convey", f"work {n}", f"done {n}")]


def test_an_answer_on_its_way_is_taken_before_a_failure_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next question would else meet it."""
    assert order_of_work(monkeypatch, 1, fails_at=2)[-3:] == ["work 2", "done 2", "failed"]


@pytest.mark.parametrize(
    ("steps", "restart", "looks"),
    [
        (1, True, [(0, True), (0, True), (0, True), (0, True)]),
        (3, True, [(0, True), (1, True), (2, True), (0, True)]),
        (3, False, [(0, True), (1, False), (2, False), (0, True)]),
    ],
)
def test_reassociated_runs_take_turns_on_the_steps(steps: int, restart: bool, looks: list[tuple[int, bool]]) -> None:
    """The error of a few sums on one batch says little about another: compiled biases were refused on steps 1 and 2."""
    arm = Mock(**{"call.return_value": 5})
    assert [(look.step, look.restore) for look in orders(arm, 4, range(steps), restart)] == looks


def test_no_further_order_is_tried_where_nothing_was_reordered() -> None:
    assert len(list(orders(Mock(**{"call.return_value": 0}), 4, [0]))) == 1


def test_a_yardstick_that_fails_is_called_what_it_is() -> None:
    assert str(Failure("RuntimeError", "no", worker="yardstick")) == "the baseline at lower precision: no"
