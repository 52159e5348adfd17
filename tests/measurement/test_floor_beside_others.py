"""Ceilings that are measured while others use the card refuse no honest step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from optexp.comparison import measure
from optexp.measurement.watchdogs import impossible
from optexp.records.profile import ProfileRecord
from tests.measurement.samples import constant, made


@pytest.mark.parametrize(
    ("others", "again_s", "ok"), [((), 5e-4, True), ((), 15e-4, False), (("train.py",), 15e-4, True)]
)
def test_a_floor_that_a_step_beats(
    others: tuple[str, ...], again_s: float, ok: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = made(constant(2e-3), constant(1e-3))
    samples[-1].foreign = others
    floors, kept = iter([15e-4, again_s]), []

    def calibrate(_: object, anew: bool, keep: bool) -> None:
        assert anew
        kept.append(keep)

    monkeypatch.setattr(measure, "floor", lambda *_: next(floors))
    result = SimpleNamespace(profile=ProfileRecord())
    session: Any = SimpleNamespace(calibrated=lambda ceilings: None, result=result, stack=(), baseline=())
    measure.find_floor(session, samples, SimpleNamespace(call=calibrate))  # type: ignore[arg-type]
    assert impossible(samples).ok is ok
    assert kept == [not others]
